"""SharedMemoryPipe: the transport between the members of one host over shared memory.

The first round of a group uses the server. After it the members negotiate whether they share memory. Only the server
can diagnose a wait: which rank is late and where, which has left, which is in another layer. So after
`ESCALATE_SECONDS` a waiting member escalates: it also sends its rows to the server, and takes the result that arrives
first, from the server or from memory.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from client.native.library import CLOSED, DONE, WAITS, NativeRow
from client.session.connection import Connection
from client.session.groups import Group
from client.session.protocol.round_trip import RoundTrip
from client.session.protocol.session import Actions, Session
from client.session.round import Round
from client.transports.group_memory import GroupMemory
from client.transports.negotiation import negotiate
from client.transports.server import ESCALATE_SECONDS, LISTEN_SECONDS, SlavePipe
from client.transports.transport import key_digest
from statsd_bn.members import NO_MEMBERS
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, RoundKey

_negotiation_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class SharedMemoryPipe(SlavePipe):
    """The transport of strict groups: over shared memory, or over the server if the members share no memory."""

    # Negotiation needs all members, so elastic groups use `SlavePipe`.

    def run_slave(self, contribution: Rows | NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> Any:
        """Exchange a contribution for the aggregate of its round; see `SlavePipe.run_slave`.

        For a `NativeRow` one call of the native core computes the row, exchanges it and finishes the pass, if possible.
        """
        connection, rows = self.connection, contribution
        with connection.round(self.layer, key, self.group, phase) as round_:
            session = round_.session
            memory, negotiation = session.transport.memory, session.transport.negotiation
            if memory is None and negotiation is not None:
                memory = negotiation.result()  # waits if another thread is still negotiating
            if isinstance(memory, GroupMemory) and not session.has_uneven_inputs:
                return _in_memory(connection, round_, memory, rows)
            own_rows = rows.measured() if isinstance(rows, NativeRow) else rows
            aggregate = connection.over_server(session, round_.key, own_rows)
            if negotiation is None and not session.has_uneven_inputs:
                _negotiate(connection, session, connection.group(self.group))
            return aggregate

    run_row = run_slave


def _negotiate(connection: Connection, session: Session, group: Group) -> None:
    """Negotiate the group's transport, in the first of several threads only."""
    with _negotiation_lock:
        if session.transport.negotiation is not None:
            return
        future: Future[Any] = Future()
        session.transport.negotiation = future
    try:
        future.set_result(negotiate(connection, group))
    except BaseException as error:
        session.transport.negotiation = None  # the next use of the group negotiates again
        future.set_exception(error)
        raise


def _in_memory(
    connection: Connection, round_: Round, memory: GroupMemory, rows: Rows | NativeRow
) -> Aggregate | RoundKey:
    """Run a round in memory; return only the key if the native core has finished the pass of a `NativeRow`."""
    session, key = round_.session, round_.key
    with memory.lock:
        try:
            if connection.broken_job.is_broken:
                # The server may have lost this member, and rounds in memory would not notice.
                memory.abandon()
            arrived = monotonic()
            state = memory.arrive(key_digest(key), rows, arrived, ESCALATE_SECONDS)
            if state == DONE and not memory.is_escalated:
                now = monotonic()
                if not isinstance(rows, NativeRow):
                    _count(session, key, memory, now - arrived, now)
                    return _aggregate(session, key, memory)
                round_.native_seconds = seconds = (memory.done_ns - memory.came) / 1e9
                _count(session, key, memory, seconds, now)
                return key
            own_rows = rows.contribution if isinstance(rows, NativeRow) else rows
            make_trip = partial(connection.round_trip, session, key, own_rows)
            if state == CLOSED:
                found: Aggregate | RoundTrip = make_trip()
            else:
                found = _run(MemoryRound(session, key, memory, arrived, make_trip), memory, connection)
        except BaseException:
            # A member that leaves a round early is out of step with the others for good.
            memory.abandon()
            raise
    # Without the lock: the other members may first need a round of another thread of this member.
    return found if isinstance(found, Aggregate) else connection.run(found)


def _run(round_: "MemoryRound", memory: GroupMemory, connection: Connection) -> Aggregate | RoundTrip:
    """Run a round that has not completed, that only the server can finish, or that another member escalated."""
    frames, due, found = round_.begin(monotonic())
    if found is None:
        memory.wait(due - monotonic())
        frames, due, found = round_.step(monotonic(), None)
    if found is not None and not frames:
        return found
    with connection.channel_pool.channel() as channel:
        while True:
            for frame in frames:
                channel.send(frame)
            if found is not None:
                return found
            memory.wait(due - monotonic())
            frames, due, found = round_.step(monotonic(), channel.receive_nowait())


@dataclass(slots=True, eq=False)
class MemoryRound:
    """A `StateMachine` for a round in memory that takes long, or that only the server can end.

    All members finish it in the same way, either in memory or over the server. The result is the aggregate, or, if only
    the server can finish the round, a round trip, which may have begun. This member has already arrived in memory.
    """

    _session: Session
    _key: RoundKey
    _memory: GroupMemory
    _arrived: float
    _make_trip: Callable[[], RoundTrip]
    _listen_seconds: float = LISTEN_SECONDS
    _trip: RoundTrip | None = field(init=False, default=None)
    _due: float = field(init=False)

    def begin(self, now: float) -> Actions[Aggregate | RoundTrip]:
        """Poll the memory."""
        self._due = self._arrived + ESCALATE_SECONDS
        return self._poll(now) or ((), self._due, None)

    def step(self, now: float, frame: bytes | None) -> Actions[Aggregate | RoundTrip]:
        """Poll the memory, then read the server's frame; escalate when it is due."""
        if finished := self._poll(now):
            return finished
        if frame is None and now < self._due:
            return (), self._next_poll(now), None
        if self._trip is None:
            return self._escalate(now)
        frames, self._due, aggregate = self._trip.step(now, frame)
        if aggregate and self._memory.late:
            # The others completed this round in an earlier turn: they are out of step with this member.
            self._memory.abandon()
        return frames, self._next_poll(now), aggregate

    def _escalate(self, now: float) -> Actions[Aggregate | RoundTrip]:
        self._memory.escalate()
        if finished := self._poll(now):
            return finished
        self._trip = self._make_trip()
        self._trip.late = self._late_ranks
        frames, self._due, aggregate = self._trip.begin(now)
        return frames, self._next_poll(now), aggregate

    def _next_poll(self, now: float) -> float:
        return min(self._due, now + self._listen_seconds)

    def _late_ranks(self) -> list[int]:
        """Ranks that have not arrived in memory; a member that leaves never arrives."""
        late = self._memory.late
        return [rank for index, rank in enumerate(self._session.members) if index in late]

    def _poll(self, now: float) -> Actions[Aggregate | RoundTrip] | None:
        """Result of the round if it has ended in memory."""
        memory = self._memory
        state = memory.wait(0.0)
        if state == WAITS:
            return None
        if state != DONE:
            # Only the server can find the reason: a member that left, other rounds, or values that are not finite.
            if self._trip:
                self._trip.late = tuple  # the memory may be in another round by then
            return (), now, self._trip or self._make_trip()
        was_sent = self._trip is not None
        _count(self._session, self._key, memory, now - self._arrived, now, was_sent=was_sent)
        aggregate = _aggregate(self._session, self._key, memory)
        # After an escalation every member reports the end of the round at once: the escalating member may be
        # descheduled or its frame lost, and the server would see a false deadlock with the next round.
        return (self._session.round_done(self._key),) if memory.is_escalated else (), now, aggregate


def _aggregate(session: Session, key: RoundKey, memory: GroupMemory) -> Aggregate:
    """Aggregate of a completed turn."""
    return Aggregate.unchecked(key, memory.rows, memory.count, session.members, memory.total, NO_MEMBERS)


def _count(
    session: Session, key: RoundKey, memory: GroupMemory, seconds: float, now: float, *, was_sent: bool = False
) -> None:
    """Count a completed turn, which took `seconds`; if its rows were sent to the server too, the server counts it."""
    transport, behind = session.transport, memory.behind_ns
    transport.bypassed_rounds += not was_sent
    transport.bypassed_seconds += seconds
    if behind:
        session.lateness.add(behind / 1e9)
    samples = transport.samples
    if samples is not None and samples.is_due(now, key):
        samples.observe(now, key, *memory.gathered_rows())
