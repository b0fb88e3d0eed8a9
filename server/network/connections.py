"""Connections: sends frames, notices disconnects, and closes bad or surplus connections.

ZeroMQ has no call to close a single connection, and does not report a connection's peer. But it reports the file
descriptor, at accept and with each message. The server closes a connection through its descriptor; to ZeroMQ the peer
then seems to have closed it. A client that is disconnected by mistake reconnects.

A frame is dropped if its peer has disconnected or does not read, because the other peers must not wait. ZeroMQ limits
the number of messages queued for a peer, not their size. The peer's connection shows whether it reads: while the kernel
accepts more data, ZeroMQ's queue is empty, and all earlier frames have left this process.
"""

import errno
import logging
import math
import os
import resource
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.core.dispatcher import Dispatcher, Received
from server.group.rounds import Reply
from server.network.listener import Listener
from server.network.reset_filter import ResetDetector, close_connection, drop_resets
from server.security.access import Principal
from statsd_bn import limits
from statsd_bn.errors import LimitExceeded, StatsdBNError
from statsd_bn.text import log_line
from statsd_bn.wire import encode_failure

logger = logging.getLogger("statsd_bn.server")

# Messages refused on one connection between two ticks before it is closed. After a restart a member of MAX_GROUPS
# groups gets one refusal in each.
MAX_REFUSALS = limits.MAX_GROUPS

# Delay of the probes after a disconnect: ZeroMQ reports a disconnect a moment before it forgets the peer. Besides, the
# connections of an ending job close within the delay, so one pass of probes is enough for all.
PROBE_SECONDS = 0.05

# Delay between the error for a peer and the end of its connection, in which ZeroMQ's thread sends the error. The peer's
# messages are ignored for IGNORED_SECONDS, because ZeroMQ still delivers buffered ones.
CLOSE_DELAY_SECONDS, IGNORED_SECONDS = 0.05, 10.0

MAX_PEER_BYTES = 2**20  # queued for one peer; a peer without queued data gets a larger reply too if the total allows

# Limit on queued bytes of all peers. Above half the limit, peers that do not read are disconnected; above the limit,
# peers with queued data get nothing; above twice the limit, only small replies are sent.
MAX_TOTAL_BYTES = 2**25

SMALL_ANSWER_BYTES = 2**16  # a peer without queued data gets a reply of up to this size, whatever others have queued

# Plain integers: combining pyzmq's flags takes as long as sending.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


def writable(descriptors: Collection[int]) -> set[int]:
    """Connections for which the kernel accepts more data; includes closed ones."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poller.poll(0)}


@dataclass(slots=True)
class Connection:
    """One connection."""

    descriptor: int
    inode: int  # of the socket, because descriptors are reused
    peer: bytes = b""  # routing id, known after the first message
    key: str = ""  # public key of the client, known after the first valid message
    session: bytes = b""  # of the member that uses it, b"" without one
    queued: int = 0  # bytes sent since its queue was last empty
    is_stalled: bool = False  # whether its queue was not empty at the last call of `stalled`
    is_closed: bool = False  # by the server; ZeroMQ has not noticed yet


class ConnectionTable:
    """All connections."""

    def __init__(self, limit: float, takes_more: Callable[[Collection[int]], set[int]] = writable) -> None:
        self.by_peer: dict[bytes, Connection] = {}  # connections of peers that have sent a message, by routing id
        self.members: dict[bytes, Principal] = {}  # keys and rights of members, by routing id
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._limit = limit
        self._writable = takes_more
        self._queued = 0
        self._next_update = MAX_TOTAL_BYTES

    def add(self, descriptor: int) -> None:
        """Add an accepted connection; beyond the limit, close the oldest one without a member."""
        with suppress(OSError):
            self._connections[descriptor] = Connection(descriptor, os.fstat(descriptor).st_ino)
        if len(self._connections) > self._limit:
            others = (number for number, one in self._connections.items() if not (one.session or one.is_closed))
            self.close(next(others, descriptor))

    def remove(self, descriptor: int) -> None:
        """Remove a connection that has ended."""
        if connection := self._connections.pop(descriptor, None):
            self._release(connection)
            self._queued -= connection.queued

    def set_peer(self, peer: bytes, descriptor: int) -> None:
        """Record the routing id of a connection's peer."""
        if connection := self._connections.get(descriptor):
            # The old peer may be wrong: a closed connection's last frame may be read after the descriptor was reused.
            self._release(connection)
            connection.peer = peer
            self.by_peer[peer] = connection

    def record(self, peer: bytes, principal: Principal, session: bytes) -> None:
        """Record a valid message of a peer that is no member; it becomes a member if the message has a session."""
        connection = self.by_peer.get(peer)
        if connection is None or connection.is_closed:
            return
        connection.key = principal.key
        if session:
            connection.session = session
            self.members[peer] = principal

    def expire_members(self, is_registered: Callable[[bytes], bool]) -> None:
        """Unmark connections of members that are no longer registered; a member's next message marks its connection."""
        for connection in self._connections.values():
            if connection.session and not is_registered(connection.session):
                self.members.pop(connection.peer, None)
                connection.session = b""

    def member_peers(self) -> dict[int, bytes]:
        """Connections of members, each with its routing id."""
        return {number: one.peer for number, one in self._connections.items() if one.session}

    def with_other_keys(self, keys: Collection[str]) -> list[int]:
        """Connections with keys that are not in `keys`."""
        return [number for number, one in self._connections.items() if one.key and one.key not in keys]

    def close(self, descriptor: int) -> None:
        """Shut down a connection; ZeroMQ notices and closes it."""
        connection = self._connections.get(descriptor)
        if connection is None or connection.is_closed:
            return
        self.members.pop(connection.peer, None)
        connection.session, connection.is_closed = b"", True
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == connection.inode:
                close_connection(descriptor)

    def may_send(self, peer: bytes, size: int) -> bool:
        """Whether to send `size` bytes to a peer; if so, they are counted."""
        connection = self.by_peer.get(peer)
        if connection is None:
            return True
        fits = self._queued + size <= MAX_TOTAL_BYTES and connection.queued + size <= MAX_PEER_BYTES  # the common case
        if not (fits or self._makes_room(connection, size)):
            return False
        connection.queued += size
        self._queued += size
        return True

    def stalled(self) -> list[int]:
        """Connections to close, largest first: too many bytes are queued, and these were not empty at the last call."""
        if self._queued <= MAX_TOTAL_BYTES // 2:
            return []
        self._update(self._connections.values())
        too_much, stalled = self._queued - MAX_TOTAL_BYTES // 2, []
        for connection in sorted(self._connections.values(), key=lambda one: -one.queued):
            if too_much > 0 and connection.queued and connection.is_stalled:
                too_much -= connection.queued
                stalled.append(connection.descriptor)
            connection.is_stalled = connection.queued > 0
        return stalled

    def _makes_room(self, connection: Connection, size: int) -> bool:
        if self._queued + size > self._next_update:
            self._update(self._connections.values())
            self._next_update = max(MAX_TOTAL_BYTES, self._queued + MAX_TOTAL_BYTES // 8)
        if self._queued + size <= MAX_TOTAL_BYTES and connection.queued + size <= MAX_PEER_BYTES:
            return True
        if connection.queued:
            self._update([connection])
        if connection.queued:
            return False
        return self._queued + size <= 2 * MAX_TOTAL_BYTES or size <= SMALL_ANSWER_BYTES

    def _update(self, connections: Iterable[Connection]) -> None:
        waited_for = {one.descriptor: one for one in connections if one.queued}
        for descriptor in self._writable(waited_for.keys()):
            connection = waited_for[descriptor]
            self._queued -= connection.queued
            connection.queued, connection.is_stalled = 0, False

    def _release(self, connection: Connection) -> None:
        self.by_peer.pop(connection.peer, None)
        self.members.pop(connection.peer, None)
        connection.session = b""


class ProbeScheduler:
    """Schedules probes of all members after disconnects."""

    def __init__(self) -> None:
        self.disconnected = -math.inf  # time of the last disconnect; members heard since need no probe
        self.due = math.inf  # time of the next pass of probes; infinity if none is needed

    def record_disconnect(self, now: float) -> None:
        """Record a disconnect; call it after all earlier frames have been received."""
        self.disconnected = now
        self.due = min(self.due, now + PROBE_SECONDS)

    def start_if_due(self, now: float) -> bool:
        """Whether a pass is due; if so, the caller sends the probes."""
        if now < self.due:
            return False
        # A disconnect after this pass was scheduled needs another pass.
        due = self.disconnected + PROBE_SECONDS
        self.due = due if due > self.due else math.inf
        return True


class ConnectionManager:
    """The connections of a listener."""

    def __init__(self, listener: Listener, dispatcher: Dispatcher) -> None:
        self._socket = listener.socket
        self._monitor = listener.monitor
        self._dispatcher = dispatcher
        # Connections get half of the file descriptors: libzmq aborts a process that has none left for a Unix socket.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._table = ConnectionTable(math.inf if files == resource.RLIM_INFINITY else files // 2)
        self._refusals: Counter[bytes] = Counter()  # since the last tick, by routing id
        self._resets = ResetDetector()
        self._probe_scheduler = ProbeScheduler()
        self._has_disconnected = False
        self._closing: dict[int, float] = {}  # connections to close, each with the time to close it
        self._ignored: dict[bytes, float] = {}  # peers of closing connections, and until when to ignore them
        self.members = self._table.members

    def send(self, replies: Iterable[Reply]) -> None:
        """Send replies; count the dropped ones."""
        for peer, frame in replies:
            if problem := self._deliver(peer, frame):
                self._dispatcher.counters.dropped_answers += 1
                # A disconnected peer has left, or is reported as lost.
                level = logging.INFO if problem == zmq.EHOSTUNREACH else logging.WARNING
                logger.log(level, "an answer to peer %s was dropped: %s", peer.hex(), zmq.strerror(problem))
                if problem == zmq.EHOSTUNREACH:
                    self.probe(self._dispatcher.unreachable(time.monotonic(), peer))

    def probe(self, probes: Iterable[Reply]) -> None:
        """Send probes; if a peer has disconnected, also probe the other addresses of its members."""
        # A loop instead of recursion, because a chain of addresses may include all connections.
        untried = deque(probes)
        while untried:
            peer, frame = untried.popleft()
            if self._deliver(peer, frame) == zmq.EHOSTUNREACH:
                untried.extend(self._dispatcher.unreachable(time.monotonic(), peer))

    def _deliver(self, peer: bytes, frame: bytes) -> int:
        """Send one frame; returns 0, or the errno of the failure."""
        if not self._table.may_send(peer, len(frame)):
            return errno.EAGAIN
        try:
            self._socket.send(peer, _MORE)
            self._socket.send(frame, _LAST)
        except zmq.ZMQError as error:
            return error.errno or errno.EIO
        return 0

    def accepts(self, peer: bytes, part: zmq.Frame) -> bool:
        """Whether to process a frame from a peer that is not a member; adds a new peer."""
        if peer in self._ignored:
            return False
        if peer not in self._table.by_peer:
            # Read the monitor first: an earlier connection with this descriptor may have been closed.
            self.read_monitor()
            with suppress(zmq.ZMQError, ValueError):  # ZeroMQ does not know the descriptor
                self._table.set_peer(peer, int(part.get(zmq.SRCFD)))
        return True

    def record(self, peer: bytes, received: Received, principal: Principal) -> None:
        """Record the outcome of a frame; closes the connection of a peer with too many refusals."""
        if received.is_refused:
            self._refusals[peer] += 1
            if self._refusals[peer] > MAX_REFUSALS:
                self._dispatcher.counters.flooding_connections += 1
                text = f"more than {MAX_REFUSALS} refused messages; closing the connection"
                self.close(peer, LimitExceeded(text, limit=MAX_REFUSALS, what="refused messages"))
        elif peer not in self.members:
            self._table.record(peer, principal, received.session)

    def close(self, peer: bytes, error: StatsdBNError) -> None:
        """Send an error to a peer and close its connection a moment later; ignore its further messages."""
        logger.warning("peer %r: %s", peer, log_line(error))
        self._ignored[peer] = time.monotonic() + IGNORED_SECONDS
        self.members.pop(peer, None)
        # If the peer has disconnected, its descriptor may belong to a newer connection, which must stay open.
        is_connected = self._deliver(peer, encode_failure(error)) != zmq.EHOSTUNREACH
        if is_connected and (connection := self._table.by_peer.get(peer)):
            self._closing[connection.descriptor] = time.monotonic() + CLOSE_DELAY_SECONDS

    def close_others(self, keys: Collection[str]) -> None:
        """Close the connections with keys that are not in `keys`, at the next call of `close_due`."""
        self._closing.update(dict.fromkeys(self._table.with_other_keys(keys), 0.0))

    def read_monitor(self) -> None:
        """Process the events of the monitor."""
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._handle_event(int(event["event"]), int(event["value"]))

    def close_due(self) -> None:
        """Close the connections that are due, and the ones that were reset by their peers."""
        now = time.monotonic()
        for descriptor in [descriptor for descriptor, when in self._closing.items() if when <= now]:
            del self._closing[descriptor]
            self._table.close(descriptor)
        for descriptor in self._resets.confirm_resets(now):
            logger.debug("the connection with descriptor %d was reset", descriptor)
            self._table.close(descriptor)

    def has_disconnected(self) -> bool:
        """Whether a connection was closed since the last call."""
        has_disconnected, self._has_disconnected = self._has_disconnected, False
        return has_disconnected

    def probe_members(self, *, disconnected: bool) -> None:
        """Probe the members that were silent since a disconnect, PROBE_SECONDS after it."""
        # Call it after all frames from before the disconnect have been received.
        now = time.monotonic()
        if disconnected:
            self._probe_scheduler.record_disconnect(now)
        if self._probe_scheduler.start_if_due(now):
            self.probe(self._dispatcher.probes(self._probe_scheduler.disconnected))

    def tick(self, now: float) -> None:
        """Close stalled connections, detect resets, clear refusal counts; call it every TICK_SECONDS."""
        self._table.expire_members(self._dispatcher.is_registered)
        members = self._table.member_peers()
        self.probe((members[one], self._dispatcher.probe) for one in self._resets.find_suspects(now, members))
        self._closing.update(dict.fromkeys(self._table.stalled(), 0.0))
        self._refusals.clear()
        self._ignored = {peer: until for peer, until in self._ignored.items() if until > now}

    def _handle_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_LISTENING:
            drop_resets(value)
        elif event == zmq.EVENT_ACCEPTED:
            # ZeroMQ may have accepted the connection before the listening socket got the filter.
            drop_resets(value)
            self._forget(value)  # an earlier connection with this descriptor
            self._table.add(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._forget(value)
            self._has_disconnected = True
        else:
            self._dispatcher.counters.refused_connections += 1

    def _forget(self, descriptor: int) -> None:
        self._closing.pop(descriptor, None)
        self._resets.remove(descriptor)
        self._table.remove(descriptor)
