"""Watch: what becomes of the connections, from the monitor's first word of one to its end.

It tells members that are still there from those whose connections have ended or were reset, and ends the connections
that are silent, flood the server, or may no longer come in.

ZeroMQ has no call to end a single connection, and does not tell whose it is or how long it has been silent. But it
tells the file descriptor, when a connection is accepted and with each message. The server ends a connection by its
descriptor; to ZeroMQ the peer has then hung up. A client that is cut off by mistake connects again by itself.
"""

import logging
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.core.dispatcher import Dispatcher, Received
from server.group.rounds import failure
from server.network.listener import Listener
from server.network.reset_filter import Resets, hang_up, let_no_reset_through
from server.network.sender import Sender
from server.security.access import Tenant
from server.security.quota import Quota
from statsd_bn.error_text import in_log
from statsd_bn.errors import LimitExceeded, StatsdBNError

# How long a connection may be silent that is no member's.
IDLE_SECONDS = 60.0


@dataclass(slots=True)
class Connection:
    """One connection.

    Attributes:
        socket: inode of the socket, because descriptors are used again.
        heard: when it was accepted, or a sound message came, or its member left.
        peer: its routing id, while a member speaks over it, which may be silent; else b"".
        session: that member's.
        key: the public key that it was made with, known once something has come over it.
    """

    socket: int
    heard: float
    peer: bytes = b""
    session: bytes = b""
    key: str = ""


class Connections:
    """The connections by file descriptor.

    Args:
        most: how many there may be.

    Attributes:
        members: the owners of the keys of members, by the routing ids that the members speak from.
    """

    def __init__(self, most: float = math.inf) -> None:
        self.members: dict[bytes, Tenant] = {}
        self._most = most
        self._connections: dict[int, Connection] = {}

    def accepted(self, now: float, descriptor: int) -> None:
        """Note a new connection; if there are too many, end the oldest one that is no member's."""
        self.ended(descriptor)
        with suppress(OSError):
            self._connections[descriptor] = Connection(os.fstat(descriptor).st_ino, now)
        if len(self._connections) > self._most:
            others = (number for number, one in self._connections.items() if not one.peer)
            self.cut(next(others, descriptor))

    def ended(self, descriptor: int) -> Connection | None:
        """Note the end of a connection; returns it if it was known."""
        connection = self._connections.pop(descriptor, None)
        if connection:
            self.members.pop(connection.peer, None)
        return connection

    def heard(self, now: float, descriptor: int, tenant: Tenant, peer: bytes = b"", session: bytes = b"") -> None:
        """Note a sound message, and its sender's routing id and session if that is a member."""
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        # A frame may be read after its connection has ended, and its descriptor may then be another's.
        connection.heard, connection.key = now, tenant.key
        if session:
            self.members.pop(connection.peer, None)
            connection.peer, connection.session = peer, session
            self.members[peer] = tenant

    def leave(self, now: float, is_registered: Callable[[bytes], bool]) -> None:
        """Note which connections are no member's any more; from now on they may be silent only as long as any other.

        If another member speaks over one as well, its next message makes the connection a member's again.
        """
        for connection in self._connections.values():
            if connection.peer and not is_registered(connection.session):
                self.members.pop(connection.peer, None)
                connection.heard, connection.peer, connection.session = now, b"", b""

    def overdue(self, now: float) -> list[int]:
        """Connections without a member that have been silent for too long."""
        connections = self._connections.items()
        return [number for number, one in connections if not one.peer and one.heard < now - IDLE_SECONDS]

    def of_members(self) -> dict[int, bytes]:
        """Connections over which members speak, each with its routing id."""
        return {number: one.peer for number, one in self._connections.items() if one.peer}

    def of_others(self, keys: set[str]) -> list[int]:
        """Connections that were made with other keys than these."""
        return [number for number, one in self._connections.items() if one.key and one.key not in keys]

    def cut(self, descriptor: int) -> None:
        """End a connection; ZeroMQ notices and closes it."""
        connection = self.ended(descriptor)
        if connection is None:
            return
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == connection.socket:
                hang_up(descriptor)


# How long after the end of a connection the members are probed: ZeroMQ tells of the end a moment before it acts on it,
# and one pass is enough for all the connections of a job that ends.
PROBE_SECONDS = 0.05


class Probing:
    """Passes over the members, and when they are due.

    Attributes:
        disconnected: when a connection ended last; a member that was heard since needs no probe.
        due: when the next pass is due; infinity if none is.
    """

    def __init__(self) -> None:
        self.disconnected = -math.inf
        self.due = math.inf

    def connection_ended(self, now: float) -> None:
        """Note the end of a connection; call it when everything that came over it has been received."""
        self.disconnected = now
        self.due = min(self.due, now + PROBE_SECONDS)

    def begin_if_due(self, now: float) -> bool:
        """Whether it is time for a pass; the caller then makes it."""
        if now < self.due:
            return False
        # A connection that ended after this pass became due needs another.
        due = self.disconnected + PROBE_SECONDS
        self.due = due if due > self.due else math.inf
        return True


# How long a connection that is being ended is ignored: ZeroMQ still hands over what has come over it.
IGNORED_SECONDS = 10.0

# How long a connection stays whose peer has been told why it ends: another thread sends the frame.
TOLD_SECONDS = 0.05

logger = logging.getLogger("statsd_bn.server")


class Watch:
    """The connections of a listener.

    Args:
        quota: what bounds them.
        listener: the socket, and its monitor.
        dispatcher: knows which sessions are registered.
        sender: reaches the peers.

    Attributes:
        members: the owners of the keys of members, by the routing ids that the members speak from.
        ignored: the routing ids of connections that are being ended, and until when to ignore them.
    """

    def __init__(self, quota: Quota, listener: Listener, dispatcher: Dispatcher, sender: Sender) -> None:
        self._listener = listener
        self._dispatcher = dispatcher
        self._sender = sender
        self._unread = sender.unread
        self._connections = Connections(_most_connections())
        self._max_refusals = quota.max_refusals
        # How many messages were refused since the last tick, by routing id.
        self._refused: Counter[bytes] = Counter()
        self._resets = Resets()
        self._probing = Probing()
        self._has_disconnected = False
        # Connections that are to end, and when.
        self._doomed: dict[int, float] = {}
        self.members = self._connections.members
        self.ignored: dict[bytes, float] = {}

    def is_heard(self, peer: bytes, part: zmq.Frame) -> bool:
        """Whether a frame from a peer that is not a member counts; notes the peer if it is new."""
        if peer in self.ignored:
            return False
        if peer not in self._unread.peers:
            # Read the monitor first: a connection that used this descriptor before may have ended.
            self.read_monitor()
            self._unread.meet(peer, _descriptor(part))
        return True

    def note(self, peer: bytes, received: Received, tenant: Tenant) -> None:
        """Note what became of a frame; ends the connection of a peer that is refused too often.

        Args:
            peer: where it came from.
            received: what became of it.
            tenant: the owner of the peer's key.
        """
        if received.is_refused:  # which does not keep its connection open
            self._refused[peer] += 1
            if self._refused[peer] > (most := self._max_refusals):
                self._dispatcher.tally.flooding_connections += 1
                what = "messages that are refused"
                text = f"expected at most {most} {what}, got more; the connection ends"
                self.end(peer, LimitExceeded(text, limit=most, what=what))
        elif peer not in self.members:
            descriptor = self._unread.descriptor(peer)
            self._connections.heard(time.monotonic(), descriptor, tenant, peer, received.session)

    def end(self, peer: bytes, error: StatsdBNError) -> None:
        """Tell a peer why its connection ends, which it does a moment later; ignore what else it sends."""
        logger.warning("peer %r: %s", peer, in_log(error))
        self.ignored[peer] = time.monotonic() + IGNORED_SECONDS
        self.members.pop(peer, None)
        # A frame may be read after its connection has ended, and another connection may have the descriptor by then.
        if self._sender.deliver(peer, failure(error)) != zmq.EHOSTUNREACH:
            self._doomed[self._unread.descriptor(peer)] = time.monotonic() + TOLD_SECONDS

    def end_others(self, keys: set[str]) -> None:
        """End the connections of all other keys at the next look."""
        self._doomed.update(dict.fromkeys(self._connections.of_others(keys), 0.0))

    def read_monitor(self) -> None:
        """Note what has happened to connections."""
        monitor = self._listener.monitor
        if not int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        with suppress(zmq.Again):
            while True:
                told = recv_monitor_message(monitor, zmq.NOBLOCK)
                self._happened(int(told["event"]), int(told["value"]))

    def end_doomed(self) -> None:
        """End the connections that are to end by now."""
        now = time.monotonic()
        due = [descriptor for descriptor, when in self._doomed.items() if when <= now]
        for descriptor in due:
            del self._doomed[descriptor]
        self._cut(due)

    def has_disconnected(self) -> bool:
        """Whether a connection has ended since this was last asked."""
        has_disconnected, self._has_disconnected = self._has_disconnected, False
        return has_disconnected

    def probe_members(self, *, disconnected: bool) -> None:
        """Probe the members that have not spoken since a connection ended, a moment after it.

        Call it when everything that came before the end has been received, also over that connection.
        """
        now = time.monotonic()
        if disconnected:
            self._probing.connection_ended(now)
        if self._probing.begin_if_due(now):
            self._sender.probe(self._dispatcher.probes(self._probing.disconnected))

    def end_reset(self) -> None:
        """End the connections that their peers have reset."""
        gone = self._resets.gone(time.monotonic())
        for descriptor in gone:
            logger.debug("the connection with descriptor %d was reset", descriptor)
        self._cut(gone)

    def tick(self, now: float) -> None:
        """End silent connections, look for reset ones, and forgive what was refused; call it four times a second."""
        self._connections.leave(now, self._dispatcher.is_registered)
        overdue = self._connections.overdue(now)
        self._dispatcher.tally.idle_connections += len(overdue)
        self._cut(overdue)
        self._suspect_resets(now)
        self._doomed.update(dict.fromkeys(self._unread.late(), 0.0))
        self._refused.clear()
        for peer in [peer for peer, until in self.ignored.items() if until <= now]:
            del self.ignored[peer]

    def _happened(self, event: int, value: int) -> None:
        if event == zmq.EVENT_LISTENING:
            let_no_reset_through(value)
        elif event == zmq.EVENT_ACCEPTED:
            # It may have been accepted before the listening socket was taken care of.
            let_no_reset_through(value)
            self._doomed.pop(value, None)  # another connection had this descriptor
            self._connections.accepted(time.monotonic(), value)
            self._unread.ended(value)
            self._resets.ended(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._doomed.pop(value, None)
            self._unread.ended(value)
            self._resets.ended(value)
            self._connections.ended(value)
            self._has_disconnected = True
        else:
            self._dispatcher.tally.refused_connections += 1

    def _suspect_resets(self, now: float) -> None:
        """Send a probe over the connections of members that may have been reset."""
        connections = self._connections.of_members()
        for descriptor in self._resets.suspects(now, connections):
            self._sender.probe([(connections[descriptor], self._dispatcher.probe)])

    def _cut(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            self._connections.cut(descriptor)


def _descriptor(frame: zmq.Frame) -> int:
    """File descriptor of the connection that a frame came over; -1 if ZeroMQ does not tell."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def _most_connections() -> float:
    """Half of the files that this process may open: libzmq ends a process that has none left for a Unix socket."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if most == resource.RLIM_INFINITY else most // 2
