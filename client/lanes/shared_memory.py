"""SharedMemoryPipe: the lane between the members of one host, over memory that they share.

Each member writes its rows, waits until all have, and adds them for itself, to the same bits as the server would. The
server has no part in it, and a restart of it goes by unnoticed. But what a wait is about is the server's business: who
is late and where, who has gone, who has come to another layer. So a member that waits for more than a moment sends its
rows to the server as well, as if there were no memory, and listens to both.
"""

import threading
import time
from concurrent.futures import Future
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

# Of each connection, the meetings of its groups, from the group's first round on; None where they have none.
_found: "WeakKeyDictionary[Connection, dict[str, Future[Meetings | None]]]" = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class SharedMemoryPipe(SlavePipe):
    """The lane over shared memory; over the server where the group's members cannot share any."""

    def run_slave(self, contribution: Rows, key: RoundKey | None = None) -> Aggregate:
        """Exchanges a contribution for the aggregate of its round; see `SlavePipe.run_slave`."""
        connection = self.connection
        meetings = None if connection.session(self.group).is_uneven else _meetings_of(connection, self.group)
        return self._exchange(contribution, key, partial(_take_part, connection, meetings) if meetings else None)


def _take_part(connection: Connection, meetings: Meetings, session: Session, key: RoundKey, rows: Rows) -> Aggregate:
    """Takes part in a round, in memory if all members come for the same one."""
    begin_trip = partial(connection.round_trip, session, key, rows)
    with meetings.lock:
        if connection.is_broken:
            # One that is lost to the server may meet the others still, and it cannot be told.
            meetings.close()
        if meetings.is_closed:
            found: Aggregate | AtServer = AtServer(begin_trip())
        else:
            round_ = RoundInMemory(session, key, rows, meetings, connection.unsettled, begin_trip)
            found = _run(round_, meetings, connection)
    # Without the lock: two threads may wait for each other there, on this member and on another.
    return found if isinstance(found, Aggregate) else connection.run(found.trip)


def _run(round_: RoundInMemory, meetings: Meetings, connection: Connection) -> Aggregate | AtServer:
    try:
        return _waited(round_, meetings, connection)
    except BaseException:
        # Whoever leaves a meeting early is out of step with the others for good.
        meetings.close()
        raise


def _waited(round_: RoundInMemory, meetings: Meetings, connection: Connection) -> Aggregate | AtServer:
    now = time.monotonic
    frames, due, found = round_.begin(now())
    if found is None:
        meetings.wait(due - now())
        frames, due, found = round_.step(now(), None)
    if found is not None:
        return found
    with connection.transport.channel() as channel:
        while True:
            for frame in frames:
                channel.send(frame)
            if found is not None:
                return found
            meetings.wait(due - now())
            frames, due, found = round_.step(now(), channel.look())


def _meetings_of(connection: Connection, group: Group | str | None) -> Meetings | None:
    """Returns where the members of a group meet in memory; None where they have no memory to share.

    The first call for a group takes rounds of all its members. Of threads that make it at once one does so, and all
    share what comes of it.
    """
    meant = connection.group(group)
    found = _found.get(connection)
    future = found.get(meant.name) if found else None
    if future is None:
        with _lock:
            found = _found.setdefault(connection, {})
            is_first = meant.name not in found
            future = found.setdefault(meant.name, Future())
        if is_first:
            _find(connection, meant, future)
    return future.result()


def _find(connection: Connection, group: Group, future: "Future[Meetings | None]") -> None:
    try:
        future.set_result(meeting_place.find(connection, group))
    except BaseException as error:
        # The next to use the group tries again.
        del _found[connection][group.name]
        future.set_exception(error)
        raise
