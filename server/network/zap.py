"""ZAP: answers ZeroMQ's question whether to let a connection in (RFC 27), and gives the connection its routing id.

ZeroMQ asks at each handshake, over a socket inside this process, and the handshake waits for the answer. A thread of
its own answers in time, however busy the server's loop is.

pyzmq has an authenticator for this. It cannot do three things that the server needs: give connections routing ids that
nobody can guess (its answers have no metadata), let an answer wait in line (`gate`), and turn a connection away with
"try again" (300) rather than "refused" (400).
"""

import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils import z85

from server.limits.access import ANYBODY
from server.network import routing_ids
from server.network.gate import Gate

logger = logging.getLogger("statsd_bn.server")

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"statsd_bn"

# ZeroMQ asks as a REQ does: an empty frame stands between who asks and what it asks.
_ENVELOPE = 2

# What follows a request's version and number: domain, address, routing id and mechanism, and with CURVE the key.
_FIELDS = 4
_KEY_BYTES = 32

# How long an answer with CURVE is held back. ZeroMQ asks first, then reads what the peer says about itself, and keeps
# the routing id that it hears last. An immediate answer came first in one of four handshakes on a busy machine.
HOLD_SECONDS = 0.001


class Gatekeeper:
    """A running thread; it ends with its context.

    Args:
        context: whose handshakes it answers.
        is_allowed: whether to let in a client with this public key, "" for none; called from the thread.
        gate: how many may come.

    Attributes:
        admitted: how many have been let in so far.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], is_allowed: Callable[[str], bool], gate: Gate) -> None:
        self.admitted = 0
        self._is_allowed = is_allowed
        self._gate = gate
        self._is_open = threading.Event()
        # A ROUTER can answer in another order than it was asked: a key that has to wait delays no other.
        self._socket = context.socket(zmq.ROUTER)
        self._waiting: list[tuple[float, int, list[bytes], str]] = []
        self._numbers = itertools.count()
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="statsd_bn gatekeeper", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Begin to answer; those that came before have waited."""
        self._is_open.set()

    def join(self) -> None:
        """Wait until the thread has ended, which it does when its context is terminated."""
        self._is_open.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                if self._socket.poll(self._milliseconds()):
                    request = self._socket.recv_multipart()
                    self._is_open.wait()
                    self._ask_in(request)
                self._let_in()
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _milliseconds(self) -> int | None:
        """How long it may wait for a request."""
        if not self._waiting:
            return None
        return max(0, math.ceil(1000 * (self._waiting[0][0] - time.monotonic())))

    def _let_in(self) -> None:
        """Let in the connections whose turn it is."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, head, key = heapq.heappop(self._waiting)
            self.admitted += 1
            # What is behind the text becomes the User-Id of each message of the connection.
            said = [b"200", b"OK", key.encode(), routing_ids.metadata(routing_ids.new())]
            self._socket.send_multipart(head + said)

    def _ask_in(self, request: list[bytes]) -> None:
        """Turn a connection away, or put it in line."""
        head, fields = request[: _ENVELOPE + 2], request[_ENVELOPE + 2 :]
        key = _key(fields)
        if key is None or not self._is_allowed(key):
            address = fields[1].decode("ascii", "replace") if len(fields) > 1 else "?"
            logger.info("refused a connection from %s: unknown key %s", address, key or "(none)")
            self._socket.send_multipart([*head, b"400", b"unknown key", b"", b""])
            return
        now = time.monotonic()
        wait = self._gate.wait_of(now, key)
        if wait is None:
            # ZeroMQ then says nothing; the client tries again after the time for a handshake.
            self._socket.send_multipart([*head, b"300", b"too many new connections", b"", b""])
            return
        due = now + wait + (HOLD_SECONDS if key else 0.0)
        heapq.heappush(self._waiting, (due, next(self._numbers), head, key))


def _key(fields: list[bytes]) -> str | None:
    """Public key that a client has proved to own the secret of; None if the request is unsound."""
    if fields[_FIELDS - 1 :] == [b"NULL"]:
        return ANYBODY.key
    if len(fields) != _FIELDS + 1 or fields[3] != b"CURVE" or len(fields[4]) != _KEY_BYTES:
        return None
    return z85.encode(fields[4]).decode("ascii")
