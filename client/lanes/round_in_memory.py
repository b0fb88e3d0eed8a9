"""RoundInMemory: one member's part in one round of a group that meets in shared memory, without a clock.

It waits in memory. After a moment it sends its rows to the server as well, as if there were no memory, and goes by
whoever is first. So the server sees every long wait, and says what it is about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client.connection.machine import Turn
from client.connection.round_trip import RoundTrip
from client.connection.session import Session, Unsettled, taken
from client.lanes.key_digest import digest_of
from client.shared_memory.meeting import Meetings
from statsd_bn import limits
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import sum_in_order
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
        meetings: of the group. It is closed if the round fails, since whoever leaves a meeting early is out of step.
        unsettled: of all groups, see `client.connection.sessions.Sessions`.
        begin_trip: returns what takes part in the round over the server, not begun.
        listen_seconds: how often to look at both, memory and server, once the server has heard of it.
    """

    def __init__(
        self,
        session: Session,
        key: RoundKey,
        rows: Rows,
        meetings: Meetings,
        unsettled: Unsettled,
        begin_trip: Callable[[], RoundTrip],
        listen_seconds: float = LISTEN_SECONDS,
    ) -> None:
        self._session = session
        self._key = key
        self._rows = rows
        self._meetings = meetings
        self._unsettled = unsettled
        self._begin_trip = begin_trip
        self._listen_seconds = listen_seconds
        self._trip: RoundTrip | None = None
        self._due = 0.0

    def begin(self, now: float) -> Turn[Aggregate | AtServer]:
        """Comes to the meeting."""
        self._due = now + ESCALATE_SECONDS
        self._meetings.arrive(digest_of(self._key), self._rows)
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
        if aggregate and not self._meetings.have_all_come:
            # The others have come to this round before, at another meeting: from now on they are out of step.
            self._meetings.close()
        return frames, self._next(now), aggregate

    def _escalate(self, now: float) -> Turn[Aggregate | AtServer]:
        self._trip = self._begin_trip()
        frames, self._due, aggregate = self._trip.begin(now)
        return (*taken(self._unsettled), *frames), self._next(now), aggregate

    def _next(self, now: float) -> float:
        return min(self._due, now + self._listen_seconds)

    def _look(self, now: float) -> Turn[Aggregate | AtServer] | None:
        """Returns how the meeting has ended, if it has."""
        meetings = self._meetings
        if not meetings.have_all_come:
            if not meetings.is_closed:
                return None
            # The last one to come may have closed at once.
            if not meetings.have_all_come:
                return (), now, self._at_server()
        aggregate = self._sum()
        if aggregate is None:
            return (), now, self._at_server()
        frames: Sequence[bytes] = ()
        if self._trip is None:
            self._unsettled[self._session] = self._key
        else:
            frames = (self._session.settled(self._key),)
        return frames, now, aggregate

    def _at_server(self) -> AtServer:
        return AtServer(self._trip or self._begin_trip())

    def _sum(self) -> Aggregate | None:
        """Returns the sum of what all have brought; None where the server has to say what is wrong with it."""
        brought = self._meetings.rows()
        if brought is None or len({rows.values.shape[1:] for rows in brought}) > 1:
            return None
        count = sum(sum(rows.counts) for rows in brought)
        if count > limits.MAX_COUNT:
            return None
        every = [row for rows in brought for row in rows.values]
        return Aggregate(self._key, len(every), count, self._session.members, sum_in_order(every))
