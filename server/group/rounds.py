"""The life of one round.

A round is opened by the first contribution that names its key, with one `FutureResult` for every member of the
group. It ends once, in one of two ways, and the frame that ended it answers everybody, late or repeated:

- no contribution is missing any more: REDUCED, and the answer is the aggregate;
- something makes that impossible: FAILED, and the answer is the failure, with its cause.

Whatever the table below does not name cannot happen, and raises if it does.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np

from server.group.contributor import Contributor
from statsd_bn import limits
from statsd_bn.error_text import MOST_ROWS, Place, Row, error_text
from statsd_bn.errors import (
    ContributionConflict,
    RoundFailed,
    RoundMismatch,
    RoundTimeout,
    StatsdBNError,
    UnknownSession,
)
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.messages import Failure
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.rows import Rows
from statsd_bn.text import told
from statsd_bn.tokens import digest
from statsd_bn.wire import encode

LATE_ADVICE = "Look at the missing ranks' logs, or raise connect(round_timeout=...) if a step may take longer."

Reply = tuple[bytes, bytes]
"""(peer, frame): what to send to whom."""


class State(StrEnum):
    """Where a round is in its life."""

    __hash__ = str.__hash__  # an enum's own is a function of Python, and each frame needs some

    WAITING = "waiting"
    REDUCED = "reduced"
    FAILED = "failed"


class Event(StrEnum):
    """What happens to a round."""

    __hash__ = str.__hash__

    CONTRIBUTED = "contributed"
    WITHDRAWN = "withdrawn"
    COMPLETED = "completed"
    BROKEN = "broken"


# In Python 3.11 a member of an enum takes as long to look up as the table below.
_CONTRIBUTED = Event.CONTRIBUTED

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.CONTRIBUTED): State.WAITING,
    (State.WAITING, Event.WITHDRAWN): State.WAITING,
    (State.WAITING, Event.COMPLETED): State.REDUCED,
    (State.WAITING, Event.BROKEN): State.FAILED,
}


class FutureResult:
    """The server's placeholder for one member's contribution to one round. The first write wins.

    Attributes:
        peer: whom to answer.
        since: when the member first waited for the answer; a repetition does not change it.
        rows: the rows that came; None before.
    """

    __slots__ = ("peer", "rows", "since")

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.peer = b""
        self.since = 0.0

    @property
    def done(self) -> bool:
        """Whether the contribution has come."""
        return self.rows is not None

    def put(self, rows: Rows, peer: bytes) -> bool:
        """Take a contribution; `peer` is whom to answer from now on.

        Returns:
            True if these are the rows kept: the first, or the same bytes again. False if they differ.
        """
        if self.rows is None:
            self.rows = rows
        elif not same(self.rows, rows):
            return False
        self.peer = peer
        return True

    def get(self) -> Rows:
        """Returns the contribution.

        Raises:
            LookupError: it has not come yet.
        """
        if self.rows is None:
            raise LookupError("this contributor has not contributed yet")
        return self.rows


def conflict(key: RoundKey, member: int) -> ContributionConflict:
    """Error of a member that sends two different contributions to one round."""
    return ContributionConflict(
        error_text(f"rank {member} sent two different contributions; the first one counts", where=str(key)),
        **key.fields,
        member=member,
    )


def same(one: Rows, other: Rows) -> bool:
    """Whether two contributions are the same, to the last bit."""
    # As integers, because a NaN equals none; without a copy, because a member may send large rows again and again.
    return one.counts == other.counts and np.array_equal(one.values.view(np.int64), other.values.view(np.int64))


class Round:
    """One exchange: a future per member, in replica order.

    Args:
        key: what identifies it.
        members: the members that take part.
        opened: when its first contribution came, in seconds.
        seconds: how long it may stay open.

    Attributes:
        held: how many bytes it keeps, see `server.security.quota`.
        latest: when the latest contribution came.
        behind: how much later that was than the one before, in seconds.
    """

    __slots__ = (
        "_pending",
        "answer",
        "behind",
        "count",
        "futures",
        "held",
        "key",
        "latest",
        "opened",
        "seconds",
        "shape",
        "state",
    )

    def __init__(self, key: RoundKey, members: Iterable[int], opened: float, seconds: float) -> None:
        self.key = key
        self.state = State.WAITING
        self.futures = {member: FutureResult() for member in sorted(members)}
        self.opened = self.latest = opened
        self.behind = 0.0
        self.seconds = seconds
        self.shape: tuple[int, ...] = ()
        self.count = 0
        self._pending = len(self.futures)
        self.answer = b""
        self.held = 0

    def advance(self, event: Event) -> None:
        """Move along the table."""
        self.state = TRANSITIONS[self.state, event]

    def put(self, member: int, rows: Rows, peer: bytes) -> None:
        """Take a member's rows.

        Raises:
            RoundMismatch: their shape is not that of the rows that came first.
            RoundFailed: the counts add up to more than can be exact, or the rows are too many for a gather.
            ContributionConflict: this member has contributed other bytes already.
        """
        future = self.futures[member]
        if future.rows is not None:
            if not future.put(rows, peer):
                raise self.conflict(member)
            return
        self._check_shape(member, rows)
        self._check_count(member, rows)
        future.put(rows, peer)
        self._pending -= 1
        self.advance(_CONTRIBUTED)

    def withdraw(self, member: int) -> None:
        """Wait no longer for a member. Its rows stay if they have come."""
        future = self.futures.get(member)
        if future is None:
            return
        future.peer = b""
        if not future.done:
            del self.futures[member]
            self._pending -= 1
        self.advance(Event.WITHDRAWN)

    def end(self, answer: bytes) -> None:
        """End with the frame of an aggregate as the answer."""
        self.advance(Event.COMPLETED)
        self.answer = answer

    def fail(self, error: StatsdBNError) -> None:
        """End with an error as the answer."""
        self.advance(Event.BROKEN)
        self.answer = failure(error, self.key)

    def rows(self) -> list[FloatArray]:
        """All rows in replica order, of a round that is complete; views.

        Raises:
            LookupError: a contribution is missing.
        """
        return [row for future in self.futures.values() for row in future.get().values]

    @property
    def is_complete(self) -> bool:
        """Whether no contribution is missing."""
        return not self._pending

    @property
    def missing(self) -> list[int]:
        """The members that have not contributed."""
        return [member for member, future in self.futures.items() if not future.done]

    @property
    def waiting(self) -> list[int]:
        """The members that have contributed."""
        return [member for member, future in self.futures.items() if future.done]

    @property
    def nr_waiting(self) -> int:
        """How many members have contributed."""
        return len(self.futures) - self._pending

    @property
    def peers(self) -> list[bytes]:
        """Whom to answer."""
        return [future.peer for future in self.futures.values() if future.peer]

    def conflict(self, member: int) -> ContributionConflict:
        """Error of a member that sends two different contributions."""
        return conflict(self.key, member)

    def timeout(self, whom: str, missing: list[int], table: Sequence[Place] = ()) -> RoundTimeout:
        """Error of a round that waited too long; it says for whom, and who waits."""
        return RoundTimeout(
            error_text(
                f"{whom} did not arrive within {self.seconds:g} s",
                table=table,
                where=str(self.key),
                advice=LATE_ADVICE,
            ),
            **self.key.fields,
            missing=missing,
            waiting=self.waiting,
            seconds=self.seconds,
        )

    def _check_shape(self, member: int, rows: Rows) -> None:
        if self.key.phase == GATHER:
            self._check_part(member, rows)
            return
        shape = rows.values.shape[1:]
        if shape == self.shape:
            return
        if not self.shape:
            self.shape = shape
            return
        (vectors, channels), (got_vectors, got_channels) = self.shape, shape
        others = ranks_in_words(Members.of(self.waiting))
        what = (
            f"expected {channels} channels, as {others} sent, got {got_channels}"
            if channels != got_channels
            else f"expected {vectors} vectors, as {others} sent, got {got_vectors}"
        )
        raise RoundMismatch(
            error_text(f"{what} from rank {member}", where=str(self.key)),
            **self.key.fields,
            expected=list(self.shape),
            got=list(shape),
            member=member,
        )

    def _check_part(self, member: int, rows: Rows) -> None:
        replicas, vectors, channels = rows.values.shape
        if (replicas, vectors) != (1, 1):
            what = f"expected 1 row of 1 vector from each rank, got {replicas} of {vectors} from rank {member}"
            raise failed(self.key, what)
        self.shape = (1, channels + (self.shape[1] if self.shape else 0))
        if (together := self.shape[1]) > limits.MAX_CHANNELS:
            what = f"expected at most {limits.MAX_CHANNELS} values of all ranks, got {together} with rank {member}'s"
            raise failed(self.key, what)

    def _check_count(self, member: int, rows: Rows) -> None:
        self.count += sum(rows.counts)
        if self.count > limits.MAX_COUNT:
            raise failed(self.key, f"counts: expected a sum of at most 2^53, got {self.count} with rank {member}'s")


def failed(key: RoundKey, reason: str) -> RoundFailed:
    """Error of a round for which there is no more specific class."""
    return RoundFailed(error_text(reason, where=str(key)), **key.fields)


def unknown(session: bytes) -> UnknownSession:
    """Error that asks a member to say who it is, and which results it was given."""
    name = digest(session).hex()
    return UnknownSession(f"the session with digest {name} is not registered here", digest=name)


def failure(error: StatsdBNError, key: RoundKey | None = None) -> bytes:
    """Frame that carries an error to a member."""
    # Some errors are kept and raised again, and each time would add its stack, with the frames that were being read.
    error.__traceback__ = None
    return encode(Failure(error.code, told(error.message), error.fields, key))


def late_table(
    now: float, round_: Round, contributors: Mapping[int, Contributor], missing: Sequence[int]
) -> list[Place]:
    """Ranks that a round waits for, and those that wait in it.

    Args:
        now: the time, on the clock of the server.
        round_: the round.
        contributors: of the group, by number.
        missing: whom the round waits for.
    """
    where = round_.key.in_words(with_call=round_.key.call > 0)
    waiting = round_.waiting
    late = [_late(now, one, contributors, where) for one in missing[:MOST_ROWS]]
    there = [_waiting(now, one, round_, contributors, where) for one in waiting[:MOST_ROWS]]
    return [
        *([Place(late, len(missing), "that have not come")] if late else []),
        *([Place(there, len(waiting), f"in {where}")] if there else []),
    ]


def _late(now: float, member: int, contributors: Mapping[int, Contributor], where: str) -> Row:
    name = _name(member, contributors)
    seen = contributors[member].where(now) if member in contributors else ""
    return Row((name, "has not come", f"to {where}"), (f"{name} {seen}",) if seen else ())


def _waiting(now: float, member: int, round_: Round, contributors: Mapping[int, Contributor], where: str) -> Row:
    return Row((_name(member, contributors), f"waits {now - round_.futures[member].since:.1f} s", f"in {where}"))


def _name(member: int, contributors: Mapping[int, Contributor]) -> str:
    """Whoever has contributed may have left since."""
    return str(contributors[member]) if member in contributors else f"rank {member}"
