"""SharedMemoryPipe: the lane between the members of one host, over memory that they share.

Each member writes its rows, waits until all have, and adds them for itself, to the same bits as the server would. The
server has no part in it, and a restart of it goes by unnoticed. But what a wait is about is the server's business: who
is late and where, who has gone, who has come to another layer. So a member that waits for more than a moment sends its
rows to the server as well, as if there were no memory, and listens to both.
"""

import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from client.connection.connection import Connection
from client.connection.groups import Group
from client.connection.session import Session
from client.lanes import meeting_place
from client.lanes.key_digest import digest_of
from client.lanes.zeromq import SlavePipe
from client.shared_memory.meeting import Meetings
from statsd_bn import limits
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import sum_in_order
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows

# How long to wait before the server hears of it; a step in which one member has more to do than the others is longer.
ESCALATE_SECONDS = 0.05

# How often to look for what the server says, while waiting.
LISTEN_SECONDS = 0.005

_meets: "WeakKeyDictionary[Connection, dict[str, Meet | None]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class SharedMemoryPipe(SlavePipe):
    """The lane over shared memory; over the server where the group's members cannot share any."""

    def run_slave(self, contribution: Rows, key: RoundKey | None = None) -> Aggregate:
        """Exchanges a contribution for the aggregate of its round; see `SlavePipe.run_slave`."""
        connection, group = self.connection, self.group
        is_uneven = connection.session(group).is_uneven
        return self._exchange(contribution, key, None if is_uneven else _meet(connection, group))


class Meet:
    """How one member takes part in the rounds of a group that has a meeting place.

    Args:
        connection: this process's connection.
        meetings: of the group.
    """

    def __init__(self, connection: Connection, meetings: Meetings) -> None:
        self._connection = connection
        self._meetings = meetings
        # The latest round that was over in memory, if the server has not heard of that.
        self._over: RoundKey | None = None

    def __call__(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate:
        """Takes part in a round, in memory if all members come for the same one."""
        meetings = self._meetings
        aggregate = None
        with meetings.lock:
            if not meetings.is_closed:
                try:
                    aggregate = self._meet(session, key, rows)
                except BaseException:
                    # Whoever leaves a meeting early is out of step with the others for good.
                    meetings.close()
                    raise
        return aggregate or self._connection.over_server(session, key, rows)

    def _meet(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate | None:
        """Returns the aggregate; None where it is to be had at the server only, for all members."""
        self._meetings.arrive(digest_of(key), rows)
        if not self._meetings.wait(ESCALATE_SECONDS):
            return self._wait_long(session, key, rows)
        return self._sum(session, key)

    def _wait_long(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate | None:
        """Waits in memory and at the server; as `_meet`."""
        meetings, now = self._meetings, time.monotonic
        trip = self._connection.round_trip(session, key, rows)
        with self._connection.transport.channel() as channel:
            if self._over:
                # Else a member that has not been awake since would seem to wait there, and this one here, for ever.
                channel.send(session.settled(self._over))
            frames, due, aggregate = trip.begin(now())
            while aggregate is None:
                for frame in frames:
                    channel.send(frame)
                if meetings.wait(LISTEN_SECONDS):
                    aggregate = self._sum(session, key)
                    if aggregate:
                        channel.send(session.settled(key))
                        self._over = None
                    return aggregate
                if meetings.is_closed:
                    return None
                answer = channel.look()
                frames, due, aggregate = trip.step(now(), answer) if answer or now() >= due else ((), due, None)
        return aggregate

    def _sum(self, session: Session, key: RoundKey) -> Aggregate | None:
        """Returns the sum of what all have brought; None where the server has to say what is wrong with it."""
        brought = self._meetings.rows()
        if brought is None or len({rows.values.shape[1:] for rows in brought}) > 1:
            return None
        count = sum(sum(rows.counts) for rows in brought)
        if count > limits.MAX_COUNT:
            return None
        every = [row for rows in brought for row in rows.values]
        self._over = key
        return Aggregate(key, len(every), count, session.members, sum_in_order(every))


def _meet(connection: Connection, group: Group | str | None) -> Meet | None:
    """Returns how to meet the members of a group in memory; None where they have no memory to share.

    The first call for a group is a round of all its members.
    """
    meets = _meets.get(connection)
    if meets is None:
        meets = _meets[connection] = {}
    meant = connection.group(group)
    if meant.name not in meets:
        meetings = meeting_place.find(connection, meant)
        meets[meant.name] = Meet(connection, meetings) if meetings else None
    return meets[meant.name]
