"""Sender: sends frames to peers, and finds out which peers cannot be reached.

A frame is dropped where its peer has gone, or does not read: nobody else may wait for it. ZeroMQ limits the number of
messages queued for a peer, not their size. Its connection shows whether a peer reads: while the kernel accepts more for
it, ZeroMQ's queue is empty, and all that was sent before has left this process.
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

# Bytes that may wait for one peer. An answer is 4 MB at most, and mostly some kB; the first one is always sent.
MOST_OF_ONE = 2**20

# Bytes that may wait for all peers, before those that do not read are cut off.
MOST = 2**25

# A peer that has read everything before gets an answer of this size, however much waits for others.
SMALL = 2**16


def writable(descriptors: Collection[int]) -> set[int]:
    """Connections for which the kernel accepts more; those that have ended are among them."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poller.poll(0)}


@dataclass(slots=True)
class _Peer:
    """A peer.

    Attributes:
        descriptor: of its connection.
        sent: bytes sent since it was last seen to read.
        is_late: whether it had not read when `late` was last called.
    """

    descriptor: int
    sent: int = 0
    is_late: bool = False


class Unread:
    """What may wait for each peer.

    Args:
        takes_more: returns those of some connections for which the kernel accepts more.

    Attributes:
        peers: those whose connections are known, by name.
    """

    def __init__(self, takes_more: Callable[[Collection[int]], set[int]] = writable) -> None:
        self._takes_more = takes_more
        self.peers: dict[bytes, _Peer] = {}
        self._by_descriptor: dict[int, bytes] = {}
        self._sent = 0
        self._next_look = MOST

    def descriptor(self, peer: bytes) -> int:
        """Descriptor of a peer's connection; -1 if it is not known."""
        known = self.peers.get(peer)
        return known.descriptor if known else -1

    def meet(self, peer: bytes, descriptor: int) -> None:
        """Note a peer's connection."""
        self.ended(descriptor)
        if descriptor >= 0:
            self.peers[peer] = _Peer(descriptor)
            self._by_descriptor[descriptor] = peer

    def ended(self, descriptor: int) -> None:
        """Note the end of a connection."""
        peer = self.peers.pop(self._by_descriptor.pop(descriptor, b""), None)
        if peer:
            self._sent -= peer.sent

    def may_send(self, name: bytes, size: int) -> bool:
        """Whether to send a peer so many bytes, because it reads what it is sent; if so they count."""
        peer = self.peers.get(name)
        if peer is None:
            return True
        if self._sent + size <= MOST and peer.sent + size <= MOST_OF_ONE:  # as nearly always
            peer.sent += size
            self._sent += size
            return True
        if self._sent + size > self._next_look:
            self._look(self.peers.values())
            self._next_look = max(MOST, self._sent + MOST // 8)
        is_crowded = self._sent + size > MOST
        if peer.sent and (is_crowded or peer.sent + size > MOST_OF_ONE):
            self._look([peer])
        if peer.sent and (is_crowded or peer.sent + size > MOST_OF_ONE):
            return False
        if self._sent + size > 2 * MOST and size > SMALL:
            return False
        peer.sent += size
        self._sent += size
        return True

    def late(self) -> list[int]:
        """Connections to cut off: too much waits, and these have not read since the last call."""
        if self._sent <= MOST // 2:
            return []
        self._look(self.peers.values())
        too_much, cut = self._sent - MOST // 2, []
        for peer in sorted(self.peers.values(), key=lambda peer: -peer.sent):
            if too_much > 0 and peer.sent and peer.is_late:
                too_much -= peer.sent
                cut.append(peer.descriptor)
            peer.is_late = peer.sent > 0
        return cut

    def _look(self, peers: Collection[_Peer]) -> None:
        waited_for = {peer.descriptor: peer for peer in peers if peer.sent}
        for descriptor in self._takes_more(waited_for.keys()):
            peer = waited_for[descriptor]
            self._sent -= peer.sent
            peer.sent, peer.is_late = 0, False


logger = logging.getLogger("statsd_bn.server")

# As plain integers: combining pyzmq's flags takes as long as sending.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Sender:
    """Sends frames over the server's socket.

    Args:
        socket: the ROUTER.
        dispatcher: is told which peers cannot be reached.

    Attributes:
        unread: what waits for each peer.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", dispatcher: Dispatcher) -> None:
        self._socket = socket
        self._dispatcher = dispatcher
        self.unread = Unread()

    def send(self, replies: Iterable[Reply]) -> None:
        """Send answers; count those that are dropped."""
        for peer, frame in replies:
            if problem := self.deliver(peer, frame):
                self._dispatcher.tally.dropped_answers += 1
                # Who has gone has left, which may cross an answer, or is told of as lost.
                level = logging.INFO if problem == zmq.EHOSTUNREACH else logging.WARNING
                logger.log(level, "an answer to peer %s was dropped: %s", peer.hex(), zmq.strerror(problem))
                self.probe(self._elsewhere(peer, problem))

    def probe(self, probes: Iterable[Reply]) -> None:
        """Send probes; where a peer has gone, probe the other addresses of its members as well.

        In a loop, not recursively: a chain of addresses may be as long as there are connections.
        """
        untried = deque(probes)
        while untried:
            peer, frame = untried.popleft()
            if problem := self.deliver(peer, frame):
                untried.extend(self._elsewhere(peer, problem))

    def deliver(self, peer: bytes, frame: bytes) -> int:
        """Send one frame; returns the number of the error that prevented it, else 0."""
        if not self.unread.may_send(peer, len(frame)):
            return errno.EAGAIN
        try:
            self._socket.send(peer, _MORE)
            self._socket.send(frame, _LAST)
        except zmq.ZMQError as error:
            return error.errno or errno.EIO
        return 0

    def _elsewhere(self, peer: bytes, problem: int) -> list[Reply]:
        return self._dispatcher.unreachable(time.monotonic(), peer) if problem == zmq.EHOSTUNREACH else []
