"""Sender: sends frames to peers and detects disconnected ones.

A frame is dropped if its peer has disconnected or does not read, because the other peers must not wait. ZeroMQ limits
the number of messages queued for a peer, not their size. The peer's connection shows whether it reads: while the kernel
accepts more data, ZeroMQ's queue is empty, and all earlier frames have left this process.
"""

import errno
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from server.core.dispatcher import Dispatcher
from server.group.rounds import Reply

logger = logging.getLogger("statsd_bn.server")

# Queued bytes of one peer. A reply has at most 4 MB, mostly some kB; the first one is always sent.
MAX_PEER_BYTES = 2**20

# Plain integers: combining pyzmq's flags takes as long as sending.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


def is_writable(descriptor: int) -> bool:
    """Whether the kernel accepts more data for a connection; also of a closed one."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(0))


@dataclass(slots=True)
class _Peer:
    descriptor: int
    sent: int = 0  # bytes since its queue was last empty


class FlowControl:
    """Limits the bytes queued for each peer."""

    def __init__(self, is_writable: Callable[[int], bool] = is_writable) -> None:
        self._is_writable = is_writable
        self.peers: dict[bytes, _Peer] = {}  # those with a known connection, by routing id
        self._by_descriptor: dict[int, bytes] = {}

    def descriptor(self, peer: bytes) -> int:
        """Descriptor of a peer's connection; -1 if unknown."""
        known = self.peers.get(peer)
        return known.descriptor if known else -1

    def add(self, peer: bytes, descriptor: int) -> None:
        """Add a peer's connection."""
        self.remove(descriptor)
        if descriptor >= 0:
            self.peers[peer] = _Peer(descriptor)
            self._by_descriptor[descriptor] = peer

    def remove(self, descriptor: int) -> None:
        """Remove a closed connection."""
        self.peers.pop(self._by_descriptor.pop(descriptor, b""), None)

    def may_send(self, name: bytes, size: int) -> bool:
        """Whether to send so many bytes to a peer; if so, they are counted."""
        peer = self.peers.get(name)
        if peer is None:
            return True
        if peer.sent and peer.sent + size > MAX_PEER_BYTES:
            if not self._is_writable(peer.descriptor):
                return False
            peer.sent = 0
        peer.sent += size
        return True


class Sender:
    """Sends frames over the server's socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", dispatcher: Dispatcher) -> None:
        self._socket = socket
        self._dispatcher = dispatcher
        self.flow_control = FlowControl()

    def send(self, replies: Iterable[Reply]) -> None:
        """Send replies; count the dropped ones."""
        for peer, frame in replies:
            if problem := self.deliver(peer, frame):
                self._dispatcher.counters.dropped_answers += 1
                # A disconnected peer has left, or is reported as lost.
                level = logging.INFO if problem == zmq.EHOSTUNREACH else logging.WARNING
                logger.log(level, "an answer to peer %s was dropped: %s", peer.hex(), zmq.strerror(problem))
                self.probe(self._other_addresses(peer, problem))

    def probe(self, probes: Iterable[Reply]) -> None:
        """Send probes; if a peer has disconnected, also probe the other addresses of its members.

        A loop instead of recursion, because a chain of addresses may include all connections.
        """
        untried = deque(probes)
        while untried:
            peer, frame = untried.popleft()
            if problem := self.deliver(peer, frame):
                untried.extend(self._other_addresses(peer, problem))

    def deliver(self, peer: bytes, frame: bytes) -> int:
        """Send one frame; returns 0, or the errno of the failure."""
        if not self.flow_control.may_send(peer, len(frame)):
            return errno.EAGAIN
        try:
            self._socket.send(peer, _MORE)
            self._socket.send(frame, _LAST)
        except zmq.ZMQError as error:
            return error.errno or errno.EIO
        return 0

    def _other_addresses(self, peer: bytes, problem: int) -> list[Reply]:
        return self._dispatcher.unreachable(time.monotonic(), peer) if problem == zmq.EHOSTUNREACH else []
