"""Connections: tracks each connection from its monitor event to its end, and closes bad ones.

ZeroMQ has no call to close a single connection, and reports neither its peer nor its idle time. But it reports the file
descriptor, at accept and with each message. The server closes a connection through its descriptor; to ZeroMQ the peer
then seems to have closed it. A client that is disconnected by mistake reconnects.
"""

import logging
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.core.dispatcher import Dispatcher, Received
from server.group.rounds import failure_frame
from server.network.listener import Listener
from server.network.reset_filter import ResetDetector, close_connection, drop_resets
from server.network.sender import Sender
from server.security.access import Principal
from statsd_bn import limits
from statsd_bn.errors import LimitExceeded, StatsdBNError
from statsd_bn.text import log_line

logger = logging.getLogger("statsd_bn.server")

IDLE_SECONDS = 60.0  # how long a connection without a member may be silent

# Messages refused on one connection between two ticks, before it is closed: after a restart a member in every group
# there may be needs as many.
MAX_REFUSALS = limits.MAX_GROUPS

# Delay of the probes after a disconnect: ZeroMQ reports it a moment before it forgets the peer, and one pass covers all
# connections of an ending job.
PROBE_SECONDS = 0.05

# Delay between the error for a peer and the end of its connection: ZeroMQ's thread sends the frame. The peer's messages
# are ignored for a while: ZeroMQ still delivers those it has buffered.
CLOSE_DELAY_SECONDS = 0.05
IGNORED_SECONDS = 10.0


@dataclass(slots=True)
class Connection:
    """One connection; peer and session are its member's while a member uses it."""

    socket: int  # inode of the socket, because descriptors are reused
    last_heard: float  # time of the accept, of the last valid message, or of its member's end
    peer: bytes = b""
    session: bytes = b""
    key: str = ""  # public key of the client, known after its first message


class ConnectionTable:
    """Connections by file descriptor."""

    def __init__(self, limit: float = math.inf) -> None:
        self.members: dict[bytes, Principal] = {}  # keys and rights of members, by routing id
        self._limit = limit
        self._connections: dict[int, Connection] = {}

    def add(self, now: float, descriptor: int) -> None:
        """Add an accepted connection; beyond the limit, close the oldest one without a member."""
        self.remove(descriptor)
        with suppress(OSError):
            self._connections[descriptor] = Connection(os.fstat(descriptor).st_ino, now)
        if len(self._connections) > self._limit:
            others = (number for number, one in self._connections.items() if not one.peer)
            self.close(next(others, descriptor))

    def remove(self, descriptor: int) -> Connection | None:
        """Remove a closed connection; returns it if it was known."""
        connection = self._connections.pop(descriptor, None)
        if connection:
            self.members.pop(connection.peer, None)
        return connection

    def record(
        self, now: float, descriptor: int, principal: Principal, peer: bytes = b"", session: bytes = b""
    ) -> None:
        """Record a valid message, with routing id and session if its sender is a member."""
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        # A frame may be read after its connection was closed and the descriptor reused.
        connection.last_heard, connection.key = now, principal.key
        if session:
            self.members.pop(connection.peer, None)
            connection.peer, connection.session = peer, session
            self.members[peer] = principal

    def expire_members(self, now: float, is_registered: Callable[[bytes], bool]) -> None:
        """Mark connections without a registered member; the idle timeout applies to them from now on.

        If another member uses the same connection, its next message marks it as a member's again.
        """
        for connection in self._connections.values():
            if connection.peer and not is_registered(connection.session):
                self.members.pop(connection.peer, None)
                connection.last_heard, connection.peer, connection.session = now, b"", b""

    def idle(self, now: float) -> list[int]:
        """Connections without a member that exceed the idle timeout."""
        connections = self._connections.items()
        return [number for number, one in connections if not one.peer and one.last_heard < now - IDLE_SECONDS]

    def member_peers(self) -> dict[int, bytes]:
        """Connections of members, each with its routing id."""
        return {number: one.peer for number, one in self._connections.items() if one.peer}

    def with_other_keys(self, keys: set[str]) -> list[int]:
        """Connections with keys that are not in `keys`."""
        return [number for number, one in self._connections.items() if one.key and one.key not in keys]

    def close(self, descriptor: int) -> None:
        """Shut down a connection; ZeroMQ notices and closes it."""
        connection = self.remove(descriptor)
        if connection is None:
            return
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == connection.socket:
                close_connection(descriptor)


class ProbeScheduler:
    """Schedules probes of all members after disconnects."""

    def __init__(self) -> None:
        self.disconnected = -math.inf  # time of the last disconnect; members heard since need no probe
        self.due = math.inf  # time of the next pass; infinity without one

    def record_disconnect(self, now: float) -> None:
        """Record a disconnect; call it after all earlier frames have been received."""
        self.disconnected = now
        self.due = min(self.due, now + PROBE_SECONDS)

    def start_if_due(self, now: float) -> bool:
        """Whether a pass is due; the caller then makes it."""
        if now < self.due:
            return False
        # A disconnect after this pass was scheduled needs another one.
        due = self.disconnected + PROBE_SECONDS
        self.due = due if due > self.due else math.inf
        return True


class ConnectionManager:
    """The connections of a listener."""

    def __init__(self, listener: Listener, dispatcher: Dispatcher, sender: Sender) -> None:
        self._listener = listener
        self._dispatcher = dispatcher
        self._sender = sender
        self._flow_control = sender.flow_control
        # Half of the open files: libzmq aborts a process without a free descriptor for a Unix socket.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._table = ConnectionTable(math.inf if files == resource.RLIM_INFINITY else files // 2)
        self._refusals: Counter[bytes] = Counter()  # since the last tick, by routing id
        self._resets = ResetDetector()
        self._probe_scheduler = ProbeScheduler()
        self._has_disconnected = False
        self._closing: dict[int, float] = {}  # connections to close, each with its time
        self._ignored: dict[bytes, float] = {}  # peers of closing connections, and until when to ignore them
        self.members = self._table.members

    def accepts(self, peer: bytes, part: zmq.Frame) -> bool:
        """Whether to process a frame from a peer that is not a member; adds a new peer."""
        if peer in self._ignored:
            return False
        if peer not in self._flow_control.peers:
            # Read the monitor first: an earlier connection with this descriptor may have been closed.
            self.read_monitor()
            self._flow_control.add(peer, _descriptor(part))
        return True

    def record(self, peer: bytes, received: Received, principal: Principal) -> None:
        """Record the outcome of a frame; closes the connection of a peer with too many refusals."""
        if received.is_refused:  # does not reset the idle timeout
            self._refusals[peer] += 1
            if self._refusals[peer] > MAX_REFUSALS:
                self._dispatcher.counters.flooding_connections += 1
                text = f"more than {MAX_REFUSALS} refused messages; closing the connection"
                self.close(peer, LimitExceeded(text, limit=MAX_REFUSALS, what="refused messages"))
        elif peer not in self.members:
            descriptor = self._flow_control.descriptor(peer)
            self._table.record(time.monotonic(), descriptor, principal, peer, received.session)

    def close(self, peer: bytes, error: StatsdBNError) -> None:
        """Send an error to a peer and close its connection a moment later; ignore its further messages."""
        logger.warning("peer %r: %s", peer, log_line(error))
        self._ignored[peer] = time.monotonic() + IGNORED_SECONDS
        self.members.pop(peer, None)
        # A frame may be read after its connection was closed and the descriptor reused.
        if self._sender.deliver(peer, failure_frame(error)) != zmq.EHOSTUNREACH:
            self._closing[self._flow_control.descriptor(peer)] = time.monotonic() + CLOSE_DELAY_SECONDS

    def close_others(self, keys: set[str]) -> None:
        """Close the connections of all other keys at the next call of `close_due`."""
        self._closing.update(dict.fromkeys(self._table.with_other_keys(keys), 0.0))

    def read_monitor(self) -> None:
        """Process the events of the monitor."""
        monitor = self._listener.monitor
        if not int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(monitor, zmq.NOBLOCK)
                self._handle_event(int(event["event"]), int(event["value"]))

    def close_due(self) -> None:
        """Close the connections that are due."""
        now = time.monotonic()
        due = [descriptor for descriptor, when in self._closing.items() if when <= now]
        for descriptor in due:
            del self._closing[descriptor]
            self._table.close(descriptor)

    def has_disconnected(self) -> bool:
        """Whether a connection was closed since the last call."""
        has_disconnected, self._has_disconnected = self._has_disconnected, False
        return has_disconnected

    def probe_members(self, *, disconnected: bool) -> None:
        """Probe the members that were silent since a disconnect, a moment after it.

        Call it after all frames from before the disconnect have been received.
        """
        now = time.monotonic()
        if disconnected:
            self._probe_scheduler.record_disconnect(now)
        if self._probe_scheduler.start_if_due(now):
            self._sender.probe(self._dispatcher.probes(self._probe_scheduler.disconnected))

    def close_reset(self) -> None:
        """Close the connections that their peers have reset."""
        for descriptor in self._resets.confirm_resets(time.monotonic()):
            logger.debug("the connection with descriptor %d was reset", descriptor)
            self._table.close(descriptor)

    def tick(self, now: float) -> None:
        """Close idle and stalled connections, detect resets, clear refusal counts; call it every TICK_SECONDS."""
        self._table.expire_members(now, self._dispatcher.is_registered)
        for descriptor in self._table.idle(now):
            self._dispatcher.counters.idle_connections += 1
            self._table.close(descriptor)
        members = self._table.member_peers()
        self._sender.probe((members[one], self._dispatcher.probe) for one in self._resets.find_suspects(now, members))
        self._closing.update(dict.fromkeys(self._flow_control.stalled(), 0.0))
        self._refusals.clear()
        for peer in [peer for peer, until in self._ignored.items() if until <= now]:
            del self._ignored[peer]

    def _handle_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_LISTENING:
            drop_resets(value)
        elif event == zmq.EVENT_ACCEPTED:
            # It may have been accepted before the listening socket got the filter.
            drop_resets(value)
            self._forget(value)  # another connection had this descriptor
            self._table.add(time.monotonic(), value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._forget(value)
            self._has_disconnected = True
        else:
            self._dispatcher.counters.refused_connections += 1

    def _forget(self, descriptor: int) -> None:
        self._closing.pop(descriptor, None)
        self._flow_control.remove(descriptor)
        self._resets.remove(descriptor)
        self._table.remove(descriptor)


def _descriptor(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1  # unknown to ZeroMQ
