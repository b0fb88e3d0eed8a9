"""Sender: sends frames to peers, and finds out which peers cannot be reached.

A frame is dropped where its peer has gone, or does not read: nobody else may wait for it.
"""

import errno
import logging
import time
from collections import deque
from collections.abc import Iterable

import zmq

from server.core.dispatcher import Dispatcher
from server.network.unread import Unread
from server.rounds.rounds import Reply

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
