"""SharedMemoryPipe: the lane between the members of one host, over memory that they share.

Each member writes its rows, waits until all have, and adds them for itself, to the same bits as the server would. The
server has no part in it, and a restart of it goes by unnoticed. But what a wait is about is the server's business: who
is late and where, who has gone, who has come to another layer. So a member that waits for more than a moment sends its
rows to the server as well, as if there were no memory, and listens to both.
"""

import time
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from client.connection.connection import Connection
from client.connection.groups import Group
from client.connection.session import Session
from client.lanes import meeting_place
from client.lanes.round_in_memory import AtServer, RoundInMemory
from client.lanes.zeromq import SlavePipe
from client.shared_memory.meeting import Meetings
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows

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

    def __call__(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate:
        """Takes part in a round, in memory if all members come for the same one."""
        connection = self._connection
        with self._meetings.lock:
            if self._meetings.is_closed:
                found: Aggregate | AtServer = AtServer(connection.round_trip(session, key, rows))
            else:
                found = self._meet(session, key, rows)
        # Without the lock: two threads may wait for each other there, on this member and on another.
        return found if isinstance(found, Aggregate) else connection.run(found.trip)

    def _meet(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate | AtServer:
        connection = self._connection
        begin_trip = partial(connection.round_trip, session, key, rows)
        try:
            return self._run(RoundInMemory(session, key, rows, self._meetings, connection.unsettled, begin_trip))
        except BaseException:
            # Whoever leaves a meeting early is out of step with the others for good.
            self._meetings.close()
            raise

    def _run(self, round_: RoundInMemory) -> Aggregate | AtServer:
        now = time.monotonic
        frames, due, found = round_.begin(now())
        if found is None:
            self._meetings.wait(due - now())
            frames, due, found = round_.step(now(), None)
        if found is not None:
            return found
        with self._connection.transport.channel() as channel:
            while True:
                for frame in frames:
                    channel.send(frame)
                if found is not None:
                    return found
                self._meetings.wait(due - now())
                frames, due, found = round_.step(now(), channel.look())


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
