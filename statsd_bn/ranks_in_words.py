"""Ranks in words, with host and process where they are known: rank 2 (host-b, pid 812)."""

import re
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType

from statsd_bn.members import Members

# How many are named one by one.
TOLD_OF = 8

# Nothing is known of where ranks run.
NOWHERE: Mapping[int, str] = MappingProxyType({})

_NAMED = re.compile(r"rank (\d+) \(([^()]+)\)")


def rank_in_words(number: int, places: Mapping[int, str]) -> str:
    """Returns one rank in words."""
    return f"rank {number} ({places[number]})" if number in places else f"rank {number}"


def ranks_in_words(numbers: Members, places: Mapping[int, str] = NOWHERE) -> str:
    """Returns some ranks in words, by number only where nothing is known of them."""
    if not numbers:
        return "no rank"
    first = list(islice(numbers, TOLD_OF))
    if not any(number in places for number in first):
        return f"rank{'s' * (len(numbers) > 1)} {numbers}"
    more = f" and {len(numbers) - TOLD_OF} more" if len(numbers) > TOLD_OF else ""
    return ", ".join(rank_in_words(number, places) for number in first) + more


def places_in(text: str) -> dict[int, str]:
    """Returns where the ranks run that a text names with their places."""
    return {int(number): place for number, place in _NAMED.findall(text)}
