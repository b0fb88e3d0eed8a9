"""Members: sets of member numbers, as runs.

Members are numbered from 0 and mostly all there, so a set of thousands is one run: two numbers on the wire.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from types import MappingProxyType

from statsd_bn import limits
from statsd_bn.errors import ProtocolError

# Sets larger than this are kept for the next time in small number only: in the worst case one takes a megabyte.
MANY = 512

# Runs of numbers in a text.
MAX_TOLD_RUNS = 8

# How many ranks a text names one by one.
TOLD_OF = 8

# Nothing is known of where ranks run.
NOWHERE: Mapping[int, str] = MappingProxyType({})

_NAMED = re.compile(r"rank (\d+) \(([^()]+)\)")


@dataclass(frozen=True, slots=True)
class Members:
    """Member numbers in ascending order.

    Attributes:
        runs: pairs of the first number of a run and how many follow one another, (0, 4) for 0, 1, 2, 3; there is a gap
            between any two runs.
    """

    runs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        end, most = -1, limits.MAX_MEMBERS
        for first, count in self.runs:
            if not (type(first) is type(count) is int and end < first and 1 <= count <= most - first):
                raise ProtocolError(
                    f"members: expected ascending runs of numbers below {most}, with gaps between them, "
                    f"got {first!r:.80}, {count!r:.80} after {end}"
                )
            end = first + count

    @staticmethod
    def of(numbers: Iterable[int]) -> "Members":
        """Returns the set of some numbers, in any order."""
        listed = tuple(numbers)
        return _of(listed) if len(listed) <= MANY else _of_many(listed)

    def plus(self, number: int) -> "Members":
        """Returns the set with one number more."""
        at = bisect_right(self.runs, number, key=_first)
        joins_before = at > 0 and number <= sum(self.runs[at - 1])
        first, count = self.runs[at - 1] if joins_before else (number, 0)
        end = max(first + count, number + 1)
        joins_behind = at < len(self.runs) and self.runs[at][0] == end
        end += self.runs[at][1] if joins_behind else 0
        return _sound((*self.runs[: at - joins_before], (first, end - first), *self.runs[at + joins_behind :]))

    def minus(self, number: int) -> "Members":
        """Returns the set without a number, which is in it."""
        at = bisect_right(self.runs, number, key=_first) - 1
        first, count = self.runs[at]
        rest = ((first, number - first), (number + 1, first + count - number - 1))
        return _sound((*self.runs[:at], *(run for run in rest if run[1]), *self.runs[at + 1 :]))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(first, first + count) for first, count in self.runs)

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        # Mostly one run, and asked once a round.
        if len(self.runs) == 1:
            ((first, count),) = self.runs
            return first <= number < first + count
        at = bisect_right(self.runs, number, key=_first) - 1
        return at >= 0 and number < sum(self.runs[at])

    def __str__(self) -> str:
        """As people write them, in bounded length: 0-6, 8."""
        told = (str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in self.runs)
        text = ", ".join(islice(told, MAX_TOLD_RUNS))
        return text if len(self.runs) <= MAX_TOLD_RUNS else f"{text} and others, {len(self)} in all"


def _sound(runs: tuple[tuple[int, int], ...]) -> Members:
    """Members of runs that need no check: there may be thousands, and one number changes at a time."""
    members = object.__new__(Members)
    object.__setattr__(members, "runs", runs)
    return members


def _first(run: tuple[int, int]) -> int:
    return run[0]


# One round after the other covers the same members.
@lru_cache(maxsize=64)
def _of(numbers: tuple[int, ...]) -> Members:
    return Members(_runs(numbers))


@lru_cache(maxsize=8)
def _of_many(numbers: tuple[int, ...]) -> Members:
    return Members(_runs(numbers))


def _runs(numbers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    ordered = sorted(set(numbers))
    # Mostly none is missing, and a group of thousands is told to each that registers.
    if ordered and ordered[-1] - ordered[0] == len(ordered) - 1:
        return ((ordered[0], len(ordered)),)
    runs: list[tuple[int, int]] = []
    for number in ordered:
        first, count = runs[-1] if runs else (-1, 0)
        if runs and number == first + count:
            runs[-1] = (first, count + 1)
        else:
            runs.append((number, 1))
    return tuple(runs)


NOBODY = Members()


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
