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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import zmq

from server.core.dispatcher import Dispatcher
from server.group.rounds import Reply

# Queued bytes of one peer. A reply has at most 4 MB, mostly some kB; the first one is always sent.
MAX_PEER_BYTES = 2**20

# Queued bytes of all peers, before peers that do not read are disconnected.
MAX_TOTAL_BYTES = 2**25

# A peer without queued data gets a reply of up to this size, regardless of the others' queues.
SMALL_ANSWER_BYTES = 2**16


def writable(descriptors: Collection[int]) -> set[int]:
    """Connections for which the kernel accepts more data; includes closed ones."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poller.poll(0)}


@dataclass(slots=True)
class _Peer:
    """Queue state of a peer.

    Attributes:
        descriptor: descriptor of its connection.
        sent: bytes sent since its queue was last empty.
        is_stalled: whether its queue was not empty at the last call of `stalled`.
    """

    descriptor: int
    sent: int = 0
    is_stalled: bool = False


class FlowControl:
    """Limits the bytes queued for each peer and for all together.

    Args:
        takes_more: returns the connections for which the kernel accepts more data.

    Attributes:
        peers: peers with a known connection, by routing id.
    """

    def __init__(self, takes_more: Callable[[Collection[int]], set[int]] = writable) -> None:
        self._writable = takes_more
        self.peers: dict[bytes, _Peer] = {}
        self._by_descriptor: dict[int, bytes] = {}
        self._sent = 0
        self._next_update = MAX_TOTAL_BYTES

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
        peer = self.peers.pop(self._by_descriptor.pop(descriptor, b""), None)
        if peer:
            self._sent -= peer.sent

    def may_send(self, name: bytes, size: int) -> bool:
        """Whether to send so many bytes to a peer; if so, they are counted."""
        peer = self.peers.get(name)
        if peer is None:
            return True
        if self._sent + size <= MAX_TOTAL_BYTES and peer.sent + size <= MAX_PEER_BYTES:  # the common case
            peer.sent += size
            self._sent += size
            return True
        if self._sent + size > self._next_update:
            self._update(self.peers.values())
            self._next_update = max(MAX_TOTAL_BYTES, self._sent + MAX_TOTAL_BYTES // 8)
        is_crowded = self._sent + size > MAX_TOTAL_BYTES
        if peer.sent and (is_crowded or peer.sent + size > MAX_PEER_BYTES):
            self._update([peer])
        if peer.sent and (is_crowded or peer.sent + size > MAX_PEER_BYTES):
            return False
        if self._sent + size > 2 * MAX_TOTAL_BYTES and size > SMALL_ANSWER_BYTES:
            return False
        peer.sent += size
        self._sent += size
        return True

    def stalled(self) -> list[int]:
        """Connections to close: too many bytes are queued, and these peers have read nothing since the last call."""
        if self._sent <= MAX_TOTAL_BYTES // 2:
            return []
        self._update(self.peers.values())
        too_much, cut = self._sent - MAX_TOTAL_BYTES // 2, []
        for peer in sorted(self.peers.values(), key=lambda peer: -peer.sent):
            if too_much > 0 and peer.sent and peer.is_stalled:
                too_much -= peer.sent
                cut.append(peer.descriptor)
            peer.is_stalled = peer.sent > 0
        return cut

    def _update(self, peers: Collection[_Peer]) -> None:
        waited_for = {peer.descriptor: peer for peer in peers if peer.sent}
        for descriptor in self._writable(waited_for.keys()):
            peer = waited_for[descriptor]
            self._sent -= peer.sent
            peer.sent, peer.is_stalled = 0, False


logger = logging.getLogger("statsd_bn.server")

# Plain integers: combining pyzmq's flags takes as long as sending.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Sender:
    """Sends frames over the server's socket.

    Attributes:
        flow_control: the queues of the peers.
    """

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
