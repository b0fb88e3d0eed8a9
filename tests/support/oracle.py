"""The expected aggregate of a round: Python floats added in order, and checked against the sum of `math.fsum`."""

import itertools
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows
from statsd_bn.round_key import GATHER, RoundKey

Lives = tuple[tuple[int, int], ...]  # (member, life) of each member; a life is one process of a member
Got = tuple[int, int, bytes]  # an aggregate's replicas, count, and bytes of values


@dataclass(frozen=True)
class MemberRows:
    member: int
    life: int
    rows: Rows


@dataclass(frozen=True)
class Expected:
    replicas: int
    count: int
    values: list[float]


def add_up(rows: Sequence[list[float]]) -> list[float]:
    """Adds vectors from left to right, beginning with the first one and not with 0."""
    total = list(rows[0])
    for row in rows[1:]:
        total = [one + other for one, other in zip(total, row, strict=True)]
    return total


def expected(phase: str, contributions: Iterable[MemberRows]) -> Expected:
    """Expected aggregate in the order of member number and row: the sum, or all rows of a gather."""
    ordered = sorted(contributions, key=lambda one: one.member)
    rows = [row.ravel().tolist() for one in ordered for row in one.rows.values]
    counts = [count for one in ordered for count in one.rows.counts]
    values = list(itertools.chain(*rows)) if phase == GATHER else add_up(rows)
    return Expected(len(rows), sum(counts), values)


def is_same(one: list[float], other: list[float]) -> bool:
    """Whether two vectors have the same bits; any NaN equals any other."""
    if struct.pack(f"<{len(one)}d", *one) == struct.pack(f"<{len(other)}d", *other):
        return True
    return len(one) == len(other) and all(
        (a != a and b != b) or struct.pack("<d", a) == struct.pack("<d", b)  # noqa: PLR0124 - NaN
        for a, b in zip(one, other, strict=True)
    )


def is_near_the_exact_sum(rows: Sequence[list[float]], total: list[float]) -> bool:
    """Whether a sum of n finite numbers is within the rounding errors of n additions in any order."""
    for column, value in zip(zip(*rows, strict=True), total, strict=True):
        size = sum(map(abs, column))
        if math.isfinite(size) and abs(math.fsum(column) - value) > len(column) * 2**-52 * size:
            return False
    return True


class Ledger:
    """All contributions of the members, and the aggregates that they receive."""

    def __init__(self) -> None:
        self._contributions: dict[RoundKey, dict[int, list[MemberRows]]] = {}
        # Received aggregates by key and lives.
        self._delivered: dict[tuple[RoundKey, Lives], Got] = {}

    def record(self, key: RoundKey, one: MemberRows) -> None:
        self._contributions.setdefault(key, {}).setdefault(one.member, []).append(one)

    def rows_of_other_lives(self, key: RoundKey, member: int, life: int) -> list[MemberRows]:
        return [one for one in self._contributions.get(key, {}).get(member, []) if one.life != life]

    def complaint(self, aggregate: Aggregate, members: Iterable[int], receiver: MemberRows) -> str:
        """The error of an aggregate that must cover `members`; empty if the aggregate is right."""
        contributions = self._contributions.get(aggregate.key, {})
        if absent := set(members) - contributions.keys():
            return f"{aggregate.key}: an aggregate, though members {sorted(absent)} brought nothing"
        raw = aggregate.replicas, aggregate.count, aggregate.values.tobytes()
        for choice in self._choices(contributions, members, receiver):
            lives = tuple((one.member, one.life) for one in choice)
            # All members receive the same bytes, so each aggregate is checked once.
            if self._delivered.get((aggregate.key, lives)) == raw:
                return ""
            right = expected(aggregate.key.phase, choice)
            counts_match = (aggregate.replicas, aggregate.count) == (right.replicas, right.count)
            if counts_match and is_same(right.values, aggregate.values.ravel().tolist()):
                return self._note(aggregate, choice, lives, raw)
        return f"{aggregate.key}: got {_fields_of(aggregate)}, expected {right}"

    def _choices(
        self, contributions: dict[int, list[MemberRows]], members: Iterable[int], receiver: MemberRows
    ) -> Iterator[tuple[MemberRows, ...]]:
        """All combinations of `receiver` with the rows of one life of each other member."""
        lives = [[receiver] if member == receiver.member else contributions[member] for member in sorted(members)]
        return itertools.product(*lives)

    def _note(self, aggregate: Aggregate, choice: tuple[MemberRows, ...], lives: Lives, raw: Got) -> str:
        rows = [row.ravel().tolist() for one in choice for row in one.rows.values]
        total = aggregate.values.ravel().tolist()
        if aggregate.key.phase != GATHER and not is_near_the_exact_sum(rows, total):
            return f"{aggregate.key}: {total} is far from the exact sum"
        if self._delivered.setdefault((aggregate.key, lives), raw) != raw:
            return f"{aggregate.key}: two members got different bytes"
        return ""


def _fields_of(aggregate: Aggregate) -> Any:
    return aggregate.replicas, aggregate.count, aggregate.values.ravel().tolist()


class KeyCounter:
    """The keys of a member's rounds, by the rule of docs/protocol.md, section Identity."""

    def __init__(self, first_step: int = 0) -> None:
        self._step = first_step
        self._mark = False
        self._calls: Counter[str] = Counter()

    def forward(self, layer: str) -> tuple[int, int]:
        if self._mark:
            self._step += 1
            self._calls.clear()
            self._mark = False
        self._calls[layer] += 1
        return self._step, self._calls[layer] - 1

    def backward(self) -> None:
        self._mark = True
