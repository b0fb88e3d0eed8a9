"""One round, and its states.

The first contribution with a new key opens a round, with one `FutureResult` for each member that takes part. A round
ends at most once, with the aggregate or a failure; `server.group.master` answers late contributions with its frame.
"""

from collections.abc import Iterable
from enum import StrEnum

import numpy as np

from statsd_bn import limits
from statsd_bn.errors import ContributionConflict, RoundFailed, RoundMismatch
from statsd_bn.members import NO_MEMBERS, Members, format_ranks
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows, is_finite, join_in_order, non_finite_members, sum_in_order
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.text import error_text

Reply = tuple[bytes, bytes]  # a peer, and the frame to send


class RoundState(StrEnum):
    """State of a round."""

    WAITING = "waiting"
    REDUCED = "reduced"
    FAILED = "failed"


class FutureResult:
    """The server's placeholder for one member's contribution to one round. The first write wins.

    Attributes:
        peer: routing id for the answer.
        since: time of the member's first contribution, which `SyncMaster` sets.
        rows: contributed rows; None before the contribution.
    """

    __slots__ = ("peer", "rows", "since")

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.peer = b""
        self.since = 0.0

    @property
    def done(self) -> bool:
        """Whether the contribution is present."""
        return self.rows is not None

    def put(self, rows: Rows, peer: bytes) -> bool:
        """Store a contribution; `peer` gets the answer from now on.

        Returns:
            True if the rows are stored, or equal the stored ones. False if they differ.
        """
        if self.rows is None:
            self.rows = rows
        elif not is_same_rows(self.rows, rows):
            return False
        self.peer = peer
        return True

    def get(self) -> Rows:
        """Returns the contribution.

        Raises:
            LookupError: it is not present.
        """
        if self.rows is None:
            raise LookupError("this contributor has not contributed yet")
        return self.rows


def conflict_error(key: RoundKey, member: int) -> ContributionConflict:
    """Error of a member that sends two different contributions to one round."""
    text = error_text(f"rank {member} sent two different contributions; the first one counts", where=str(key))
    return ContributionConflict(text, **key.fields, member=member)


def is_same_rows(one: Rows, other: Rows) -> bool:
    """Whether two contributions are bitwise equal."""
    # As integers, because NaN is not equal to itself; without a copy, because a member may repeat large rows often.
    return one.counts == other.counts and np.array_equal(one.values.view(np.int64), other.values.view(np.int64))


class Round:
    """One exchange, with a future per member in rank order."""

    __slots__ = (
        *("allocated", "answer", "count", "futures", "gap", "key", "last_contribution"),
        *("nr_missing", "opened", "seconds", "shape", "state"),
    )

    def __init__(self, key: RoundKey, members: Iterable[int], opened: float, seconds: float) -> None:
        self.key = key
        self.state = RoundState.WAITING
        self.futures = {member: FutureResult() for member in sorted(members)}
        self.opened = self.last_contribution = opened
        self.gap = 0.0  # seconds between the last two contributions
        self.seconds = seconds
        self.shape: tuple[int, ...] = ()
        self.count = 0
        self.nr_missing = len(self.futures)
        self.answer = b""
        self.allocated = 0  # bytes, see `server.security.quota`

    def put(self, member: int, rows: Rows, peer: bytes) -> None:
        """Store a member's rows; raises RoundMismatch, RoundFailed or ContributionConflict."""
        future = self.futures[member]
        if is_first := future.rows is None:
            self._check_shape(member, rows)
            self.count += sum(rows.counts)
            if self.count > limits.MAX_COUNT:
                what = f"counts: expected a sum of at most 2^53, got {self.count} with rank {member}'s"
                raise round_failed(self.key, what)
        if not future.put(rows, peer):
            raise conflict_error(self.key, member)
        self.nr_missing -= is_first

    def withdraw(self, member: int) -> None:
        """Stop waiting for a member; rows that are present stay."""
        future = self.futures.get(member)
        if future is None:
            return
        future.peer = b""
        if not future.done:
            del self.futures[member]
            self.nr_missing -= 1

    def end(self, answer: bytes, state: RoundState = RoundState.REDUCED) -> None:
        """End with a frame as the answer, an encoded aggregate or failure."""
        if self.state is not RoundState.WAITING:
            raise RuntimeError(f"{self.key}: the round has ended already")
        self.state, self.answer = state, answer

    @property
    def missing(self) -> list[int]:
        """The members that have not contributed."""
        return [member for member, future in self.futures.items() if not future.done]

    @property
    def waiting(self) -> list[int]:
        """The members that have contributed and wait for the others."""
        return [member for member, future in self.futures.items() if future.done]

    @property
    def peers(self) -> list[bytes]:
        """Routing ids for the answer."""
        return [future.peer for future in self.futures.values() if future.peer]

    def _check_shape(self, member: int, rows: Rows) -> None:
        if self.key.phase == GATHER:
            self._check_part(member, rows)
            return
        shape = rows.values.shape[1:]
        self.shape = self.shape or shape
        if shape == self.shape:
            return
        axis, what = (1, "channels") if self.shape[1] != shape[1] else (0, "vectors")
        others = format_ranks(Members.of(self.waiting))
        text = f"expected {self.shape[axis]} {what}, as {others} sent, got {shape[axis]} from rank {member}"
        fields = {**self.key.fields, "expected": list(self.shape), "got": list(shape), "member": member}
        raise RoundMismatch(error_text(text, where=str(self.key)), **fields)

    def _check_part(self, member: int, rows: Rows) -> None:
        replicas, vectors, channels = rows.values.shape
        if (replicas, vectors) != (1, 1):
            what = f"expected 1 row of 1 vector from each rank, got {replicas} of {vectors} from rank {member}"
            raise round_failed(self.key, what)
        self.shape = (1, channels + (self.shape[1] if self.shape else 0))
        if (together := self.shape[1]) > limits.MAX_CHANNELS:
            what = f"expected at most {limits.MAX_CHANNELS} values of all ranks, got {together} with rank {member}'s"
            raise round_failed(self.key, what)


def round_failed(key: RoundKey, reason: str) -> RoundFailed:
    """Error of a round without a more specific class."""
    return RoundFailed(error_text(reason, where=str(key)), **key.fields)


def reduce_round(round_: Round) -> Aggregate:
    """Reduces one complete round: adds all rows in replica order, or joins them in that order for a gather.

    Raises:
        LookupError: a contribution is missing.
    """
    rows = [row for future in round_.futures.values() for row in future.get().values]  # views, in replica order
    members = Members.of(round_.futures)
    if round_.key.phase == GATHER:
        return Aggregate(round_.key, len(rows), round_.count, members, join_in_order(rows))
    total, whose = sum_in_order(rows) if len(rows) > 1 else rows[0], NO_MEMBERS
    if not is_finite(total):
        whose = non_finite_members((member, future.get().values) for member, future in round_.futures.items())
    return Aggregate.unchecked(round_.key, len(rows), round_.count, members, total, whose)
