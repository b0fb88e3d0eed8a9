"""ZAP: answers ZeroMQ's question whether a key is let in (RFC 27).

ZeroMQ asks at each handshake, over a socket inside this process, and the handshake waits for the answer; so a thread of
its own gives it at once, however busy the server's loop is.
"""

import logging
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

logger = logging.getLogger("statsd_bn.server")

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"statsd_bn"

# What follows a request's version and number: domain, address, routing id, mechanism and the key.
_FIELDS = 5
_KEY_BYTES = 32


class Gatekeeper:
    """A running thread; it ends with its context.

    Args:
        context: whose handshakes it answers.
        is_allowed: whether a public key is let in; called from the thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="statsd_bn gatekeeper", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the thread has ended, which it does when its context is terminated."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number, *fields = request
        key = _key(fields)
        if key and self._is_allowed(key):
            # What is behind the text becomes the User-Id of each message of the connection.
            return [version, number, b"200", b"OK", key.encode(), b""]
        address = fields[1].decode("ascii", "replace") if len(fields) > 1 else "?"
        logger.info("refused a connection from %s: unknown key %s", address, key or "(none)")
        return [version, number, b"400", b"unknown key", b"", b""]


def _key(fields: list[bytes]) -> str:
    """Returns the public key that a client has shown that it has the secret of, or nothing."""
    if len(fields) != _FIELDS or fields[3] != b"CURVE" or len(fields[4]) != _KEY_BYTES:
        return ""
    return z85.encode(fields[4]).decode("ascii")
