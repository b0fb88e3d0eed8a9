"""Sets of member numbers, as runs.

Members are numbered from 0, and a set usually has all of them. So a set of thousands is one run: two numbers on the
wire.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from operator import itemgetter
from types import MappingProxyType

from statsd_bn import limits
from statsd_bn.errors import ProtocolError

MAX_SMALL = 512  # larger sets are not cached: in the worst case a set takes a megabyte
MAX_PRINTED_RUNS = 8  # of numbers, in a text
MAX_NAMED_RANKS = 8  # with their places, in a text

_first = itemgetter(0)
_NAMED = re.compile(r"rank (\d+) \(([^()]+)\)")


@dataclass(frozen=True, slots=True)
class Members:
    """Member numbers in ascending order."""

    runs: tuple[tuple[int, int], ...] = ()  # first number and length, with gaps between runs: (0, 4) is 0, 1, 2, 3

    def __post_init__(self) -> None:
        end, limit = -1, limits.MAX_MEMBERS
        for first, count in self.runs:
            if not (type(first) is type(count) is int and end < first and 1 <= count <= limit - first):
                raise ProtocolError(
                    f"members: expected ascending runs of numbers below {limit}, with gaps between them, "
                    f"got {first!r:.80}, {count!r:.80} after {end}"
                )
            end = first + count

    @staticmethod
    def of(numbers: Iterable[int]) -> "Members":
        """Returns the set of these numbers, in any order."""
        listed = tuple(numbers)
        return _of(listed) if len(listed) <= MAX_SMALL else Members(_runs(listed))

    def plus(self, number: int) -> "Members":
        """Returns the set with another number."""
        at = bisect_right(self.runs, number, key=_first)
        joins_before = at > 0 and number <= sum(self.runs[at - 1])
        first, count = self.runs[at - 1] if joins_before else (number, 0)
        end = max(first + count, number + 1)
        joins_behind = at < len(self.runs) and self.runs[at][0] == end
        end += self.runs[at][1] if joins_behind else 0
        return _unchecked((*self.runs[: at - joins_before], (first, end - first), *self.runs[at + joins_behind :]))

    def minus(self, number: int) -> "Members":
        """Returns the set without one of its numbers."""
        at = bisect_right(self.runs, number, key=_first) - 1
        first, count = self.runs[at]
        rest = ((first, number - first), (number + 1, first + count - number - 1))
        return _unchecked((*self.runs[:at], *(run for run in rest if run[1]), *self.runs[at + 1 :]))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(first, first + count) for first, count in self.runs)

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        # The usual case, needed in each round.
        if len(self.runs) == 1:
            ((first, count),) = self.runs
            return first <= number < first + count
        at = bisect_right(self.runs, number, key=_first) - 1
        return at >= 0 and number < sum(self.runs[at])

    def __str__(self) -> str:
        """Returns the numbers as ranges, in bounded length: 0-6, 8."""
        ranges = (str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in self.runs)
        text = ", ".join(islice(ranges, MAX_PRINTED_RUNS))
        return text if len(self.runs) <= MAX_PRINTED_RUNS else f"{text} and others, {len(self)} in all"


def _unchecked(runs: tuple[tuple[int, int], ...]) -> Members:
    """Returns members without checking the runs: there may be thousands, and one number changes at a time."""
    members = object.__new__(Members)
    object.__setattr__(members, "runs", runs)
    return members


# Consecutive rounds have the same members.
@lru_cache(maxsize=64)
def _of(numbers: tuple[int, ...]) -> Members:
    return Members(_runs(numbers))


def _runs(numbers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    ordered = sorted(set(numbers))
    # Usually no number is missing. Speed counts: each registering member receives the whole set.
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


NO_MEMBERS = Members()


def format_rank(number: int, places: Mapping[int, str]) -> str:
    """Returns a rank with its place, if known."""
    return f"rank {number} ({places[number]})" if number in places else f"rank {number}"


def format_ranks(numbers: Members, places: Mapping[int, str] = MappingProxyType({})) -> str:
    """Returns ranks with their places, or as ranges of numbers if no place is known."""
    if not numbers:
        return "no rank"
    first = list(islice(numbers, MAX_NAMED_RANKS))
    if not any(number in places for number in first):
        return f"rank{'s' * (len(numbers) > 1)} {numbers}"
    more = f" and {len(numbers) - MAX_NAMED_RANKS} more" if len(numbers) > MAX_NAMED_RANKS else ""
    return ", ".join(format_rank(number, places) for number in first) + more


def parse_places(text: str) -> dict[int, str]:
    """Returns the places in a text that `format_ranks` wrote, by rank."""
    return {int(number): place for number, place in _NAMED.findall(text)}
