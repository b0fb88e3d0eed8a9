"""RoundInMemory: one member's part in one round of a group that shares memory, without a clock.

It waits in memory. After a moment it sends its rows to the server as well, as if there were no memory, and goes by
whoever is first. So the server sees every long wait, and says what it is about.
"""

from collections.abc import Callable
from dataclasses import dataclass

from client.conversation.machine import Turn
from client.conversation.round_trip import RoundTrip
from client.conversation.session import Session
from client.shared_memory.group_memory import GroupMemory
from client.transports.key_digest import digest_of
from statsd_bn import limits
from statsd_bn.members import NOBODY
from statsd_bn.messages import Aggregate, sound_aggregate
from statsd_bn.reduction import is_finite, sum_rows
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows

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


class RoundInMemory:
    """A `Machine` whose result is the aggregate; or `AtServer`, for all members alike.

    Args:
        session: who speaks.
        key: of the round.
        rows: what this member brings.
        memory: of the group. It is closed if the round fails, since whoever leaves a round early is out of step.
        begin_trip: returns what takes part in the round over the server, not begun.
        listen_seconds: how often to look at both, memory and server, once the server has heard of it.
    """

    def __init__(
        self,
        session: Session,
        key: RoundKey,
        rows: Rows,
        memory: GroupMemory,
        begin_trip: Callable[[], RoundTrip],
        listen_seconds: float = LISTEN_SECONDS,
    ) -> None:
        self._session = session
        self._key = key
        self._rows = rows
        self._memory = memory
        self._begin_trip = begin_trip
        self._listen_seconds = listen_seconds
        self._trip: RoundTrip | None = None
        self._began = self._due = 0.0

    def begin(self, now: float) -> Turn[Aggregate | AtServer]:
        """Writes its rows."""
        self._began, self._due = now, now + ESCALATE_SECONDS
        if self._memory.arrive(digest_of(self._key), self._rows, now):
            return self._end(now)
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
        if not memory.have_all_come:
            if not memory.is_closed:
                return None
            # The last one to come may have closed at once.
            if not memory.have_all_come:
                return (), now, self._at_server()
        return self._end(now)

    def _end(self, now: float) -> Turn[Aggregate | AtServer]:
        """Returns how the round has ended in memory, to which all have come."""
        memory, aggregate = self._memory, self._sum(now)
        if aggregate is None:
            return (), now, self._at_server()
        self._session.transport.rounds_in_memory += self._trip is None
        self._session.transport.seconds_in_memory += now - self._began
        if behind := memory.seconds_behind:
            self._session.lateness.add(behind)
        if memory.is_told:
            # Everybody says so, and at once: the teller may be asleep, or what it says may be lost. It would seem to
            # wait there still for this member, and this one in the next round for it.
            return (self._session.settled(self._key),), now, aggregate
        return (), now, aggregate

    def _at_server(self) -> AtServer:
        if self._trip:
            self._trip.late = tuple  # the memory may be about another round by then
        return AtServer(self._trip or self._begin_trip())

    def _sum(self, now: float) -> Aggregate | None:
        """Returns the sum of what all have brought; None where the server has to say what is wrong with it.

        A sum that is not finite goes to the server too, so that its status and its log say whose NaN or infinity it is.
        """
        brought = self._memory.brought()
        if brought is None or (count := sum(brought.counts)) > limits.MAX_COUNT:
            return None
        total = sum_rows(brought.values)
        if not is_finite(total):
            return None
        if samples := self._session.transport.samples:
            samples.look(now, self._key, brought.counts, brought.replicas, brought.values)
        return sound_aggregate(self._key, len(brought.values), count, self._session.members, total, NOBODY)
