"""SharedMemoryPipe: the transport between the members of one host, over memory that they share.

The first round of a group goes over the server. After it the members agree on whether they share memory. If they do,
each member writes its rows, waits until all have, and adds them for itself, to the same bits as the server would. The
server has no part in it, and a restart of it goes by unnoticed. But what a wait is about is the server's business: who
is late and where, who has gone, who has come to another layer. So a member that waits for more than a moment sends its
rows to the server as well, as if there were no memory, and listens to both.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import monotonic
from weakref import WeakKeyDictionary

from client.native.library import CLOSED, DONE
from client.native.row import NativeRow
from client.session.connection import Connection
from client.session.groups import Group
from client.session.protocol.session import Session
from client.transports import agreement
from client.transports.group_memory import GroupMemory
from client.transports.key_digest import digest_of
from client.transports.round_in_memory import ESCALATE_SECONDS, AtServer, RoundInMemory, aggregate_in, count
from client.transports.server import SlavePipe
from client.transports.transport import RowDone
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, RoundKey

# Of each connection, the memory of its groups, from the group's first round on; None where they do not share any.
_agreed: "WeakKeyDictionary[Connection, dict[str, Future[GroupMemory | None]]]" = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class SharedMemoryPipe(SlavePipe):
    """The transport over shared memory; over the server where the group's members do not share any.

    It is the transport of every strict group, since all members have to agree.
    """

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Exchanges a contribution for the aggregate of its round; see `SlavePipe.run_slave`."""
        found: Aggregate = self.connection.exchange(self.layer, contribution, key, self.group, self._take_part, phase)
        return found

    def run_row(self, row: NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate | RowDone:
        """The same with a row that the core computes, brings to the memory and uses, in one call."""
        found: Aggregate | RowDone = self.connection.exchange(self.layer, row, key, self.group, self._take_part, phase)
        return found

    def _take_part(self, session: Session, key: RoundKey, rows: Rows | NativeRow) -> Aggregate | RowDone:
        memory = session.transport.memory or self._agreed_memory(session)
        connection = self.connection
        if not isinstance(memory, GroupMemory) or session.is_uneven:
            rows = rows.measured() if isinstance(rows, NativeRow) else rows
            aggregate = connection.over_server(session, key, rows)
            if memory is None and not session.is_uneven:
                _agree(connection, connection.group(self.group))
            return aggregate
        with memory.lock:
            try:
                if connection.is_broken:
                    # The server may have lost this member, and in memory it would go on: there nothing says so.
                    memory.close()
                began = monotonic()
                stands = memory.arrive(digest_of(key), rows, began, ESCALATE_SECONDS)
                if stands == DONE and not memory.found.is_told:
                    return _done(session, key, memory, rows, began)
                brought = rows.brought if isinstance(rows, NativeRow) else rows
                begin_trip = partial(connection.round_trip, session, key, brought)
                if stands == CLOSED:
                    found: Aggregate | AtServer = AtServer(begin_trip())
                else:
                    round_ = RoundInMemory(session, key, memory, began, begin_trip)
                    found = _go_on(round_, memory, connection)
            except BaseException:
                # A member that leaves a round early is out of step with the others for good.
                memory.close()
                raise
        # Without the lock: two threads may wait for each other there, on this member and on another.
        return found if isinstance(found, Aggregate) else connection.run(found.trip)

    def _agreed_memory(self, session: Session) -> GroupMemory | None:
        """Waits for another thread that is about to agree."""
        agreed = _agreed.get(self.connection, {}).get(session.member.group)
        return agreed.result() if agreed else None


def _agree(connection: Connection, group: Group) -> None:
    """Finds out whether the group shares memory; of threads that come at once the first one does so."""
    with _lock:
        of_groups = _agreed.setdefault(connection, {})
        if group.name in of_groups:
            return
        agreed: Future[GroupMemory | None] = of_groups.setdefault(group.name, Future())
    try:
        agreed.set_result(agreement.agree(connection, group))
    except BaseException as error:
        # The next to use the group tries again.
        del of_groups[group.name]
        agreed.set_exception(error)
        raise


def _done(
    session: Session, key: RoundKey, memory: GroupMemory, rows: Rows | NativeRow, began: float
) -> Aggregate | RowDone:
    """Ends a round that is done in memory: with a row that the core has computed, it has used the sum as well."""
    now = monotonic()
    if isinstance(rows, NativeRow):
        seconds = (memory.found.done - memory.found.came) / 1e9
        count(session, key, memory, seconds, now)
        return RowDone(key, seconds)
    return aggregate_in(session, key, memory, now - began, now)


def _go_on(round_: RoundInMemory, memory: GroupMemory, connection: Connection) -> Aggregate | AtServer:
    """Ends a round that is not done in memory within a moment, or of which the server has heard."""
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
            frames, due, found = round_.step(monotonic(), channel.look())
