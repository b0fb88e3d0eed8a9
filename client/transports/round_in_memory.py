"""RoundInMemory: what a member does whose round in memory takes longer than a moment, without a clock.

It sends its rows to the server as well, as if there were no memory, and takes the first answer. So the server sees
every long wait, and says what it is about.
"""

from collections.abc import Callable
from dataclasses import dataclass

from client.native.library import DONE, WAITS
from client.session.protocol.round_trip import RoundTrip
from client.session.protocol.session import Session, Turn
from client.transports.group_memory import GroupMemory
from statsd_bn.members import NOBODY
from statsd_bn.messages import Aggregate, sound_aggregate
from statsd_bn.round_key import RoundKey

# How long to wait before the server hears of it; a step in which one member has more to do than the others is longer.
ESCALATE_SECONDS = 0.05

# How often to look from then on.
LISTEN_SECONDS = 0.005


@dataclass(frozen=True)
class AtServer:
    """Says that the aggregate is to be had at the server only.

    Attributes:
        trip: what takes part in the round over the server, begun or not.
    """

    trip: RoundTrip


def aggregate_in(
    session: Session, key: RoundKey, memory: GroupMemory, seconds: float, now: float, *, was_sent: bool = False
) -> Aggregate:
    """Returns the aggregate of a turn that is done, and counts it; arguments as for `count`."""
    count(session, key, memory, seconds, now, was_sent=was_sent)
    found = memory.found
    return sound_aggregate(key, found.rows, found.count, session.members, memory.total, NOBODY)


def count(
    session: Session, key: RoundKey, memory: GroupMemory, seconds: float, now: float, *, was_sent: bool = False
) -> None:
    """Counts a turn that is done.

    Args:
        session: of this member.
        key: of the round.
        memory: of the group.
        seconds: that this member was in it.
        now: the time.
        was_sent: whether this member has sent its rows to the server too, which then counts the round.
    """
    transport, behind = session.transport, memory.found.behind
    transport.rounds_in_memory += not was_sent
    transport.seconds_in_memory += seconds
    if behind:
        session.lateness.add(behind / 1e9)
    samples = transport.samples
    if samples is not None and samples.is_due(now, key):
        samples.look(now, key, *memory.brought())


class RoundInMemory:
    """A `Machine` whose result is the aggregate; or `AtServer`, for all members alike.

    Args:
        session: of this member.
        key: of the round.
        memory: of the group, at the turn of this round. It is closed if the round fails, since a member that leaves a
            round early is out of step.
        began: when this member came to that turn.
        begin_trip: returns what takes part in the round over the server, not begun.
        listen_seconds: how often to look at both, memory and server, once the server has heard of it.
    """

    def __init__(
        self,
        session: Session,
        key: RoundKey,
        memory: GroupMemory,
        began: float,
        begin_trip: Callable[[], RoundTrip],
        listen_seconds: float = LISTEN_SECONDS,
    ) -> None:
        self._session = session
        self._key = key
        self._memory = memory
        self._begin_trip = begin_trip
        self._listen_seconds = listen_seconds
        self._trip: RoundTrip | None = None
        self._began, self._due = began, began + ESCALATE_SECONDS

    def begin(self, now: float) -> Turn[Aggregate | AtServer]:
        """Looks at the memory."""
        return self._look(now) or ((), self._due, None)

    def step(self, now: float, frame: bytes | None) -> Turn[Aggregate | AtServer]:
        """Looks at the memory, then at what the server says.

        Raises:
            StatsdBNError: the round failed, with the reason.
        """
        if over := self._look(now):
            return over
        if frame is None and now < self._due:
            return (), self._next(now), None
        if self._trip is None:
            return self._escalate(now)
        frames, self._due, aggregate = self._trip.step(now, frame)
        if aggregate and not self._memory.have_all_come:
            # The others have come to this round before, at another turn: from now on they are out of step.
            self._memory.close()
        return frames, self._next(now), aggregate

    def _escalate(self, now: float) -> Turn[Aggregate | AtServer]:
        self._memory.tell()
        if over := self._look(now):
            return over
        self._trip = self._begin_trip()
        self._trip.late = self._late
        frames, self._due, aggregate = self._trip.begin(now)
        return frames, self._next(now), aggregate

    def _late(self) -> list[int]:
        """The ranks that have not come, as far as the memory says: who ends comes no more."""
        late = self._memory.late
        return [rank for place, rank in enumerate(self._session.members) if place in late]

    def _next(self, now: float) -> float:
        return min(self._due, now + self._listen_seconds)

    def _look(self, now: float) -> Turn[Aggregate | AtServer] | None:
        """Returns how the round has ended in memory, if it has."""
        memory = self._memory
        found = memory.wait(0.0)
        if found == WAITS:
            return None
        if found != DONE:
            # The server has to say what is wrong: who ends, or whose NaN or infinity it is.
            return (), now, self._at_server()
        was_sent = self._trip is not None
        aggregate = aggregate_in(self._session, self._key, memory, now - self._began, now, was_sent=was_sent)
        # If it was told, all say so, and at once: the teller may be asleep, or what it says may be lost. It would seem
        # to wait there still for this member, and this one in the next round for it.
        return (self._session.settled(self._key),) if memory.found.is_told else (), now, aggregate

    def _at_server(self) -> AtServer:
        if self._trip:
            self._trip.late = tuple  # the memory may be about another round by then
        return AtServer(self._trip or self._begin_trip())
