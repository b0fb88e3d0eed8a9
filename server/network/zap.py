"""ZAP: answers ZeroMQ's question whether to let a connection in (RFC 27), and gives the connection its routing id.

ZeroMQ asks at each handshake, over a socket inside this process, and the handshake waits for the answer. A thread of
its own answers in time, however busy the server's loop is.

A ZeroMQ peer may set its own routing id; to one that sets none, ZeroMQ gives the next number of a count. If another
peer has already set that number, libzmq ends the whole process. So the gatekeeper gives each connection an id that
nobody can guess. ZeroMQ keeps the id that it hears last, which is the gatekeeper's, except in rare moments. For these
the count starts at a number that no peer knows. pyzmq's authenticator cannot do this: its answers have no metadata.
"""

import ctypes
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils import z85

from server.security.access import ANYBODY

# Nobody guesses one in the life of a universe; written in hexadecimal, since pyzmq reads properties as text.
_RANDOM_BYTES = 12


def seed_routing_ids() -> None:
    """Seed libc's `rand()`, where ZeroMQ's count starts and which it never seeds; call it before any socket is made."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))


def _metadata(routing_id: bytes) -> bytes:
    """Metadata that the gatekeeper sets for a connection; it overrides what the peer says.

    ZeroMQ sets the real descriptor before, unless it does not know the peer's address.
    """
    return _property(b"Identity", routing_id) + _property(b"__fd", b"-1")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


logger = logging.getLogger("statsd_bn.server")

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"statsd_bn"

# ZeroMQ asks as a REQ does: an empty frame stands between who asks and what it asks.
_ENVELOPE = 2

# What follows a request's version and number: domain, address, routing id and mechanism, and with CURVE the key.
_FIELDS = 4
_KEY_BYTES = 32

# How long answers are held back. ZeroMQ asks first, then reads what the peer says about itself, and keeps the routing
# id that it hears last. An immediate answer came first in one of four handshakes on a busy machine.
HOLD_SECONDS = 0.001


class Gatekeeper:
    """A running thread; it ends with its context.

    Args:
        context: whose handshakes it answers.
        is_allowed: whether to let in a client with this public key, "" for none; called from the thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._is_open = threading.Event()
        # A REP would take the next request only after an answer: each would be held back by itself.
        self._socket = context.socket(zmq.ROUTER)
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
                requests = [self._socket.recv_multipart()]
                self._is_open.wait()
                with suppress(zmq.Again):
                    while True:
                        requests.append(self._socket.recv_multipart(zmq.NOBLOCK))
                time.sleep(HOLD_SECONDS)
                for request in requests:
                    self._socket.send_multipart(self._answer(request))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        head, fields = request[: _ENVELOPE + 2], request[_ENVELOPE + 2 :]
        key = _key(fields)
        if key is None or not self._is_allowed(key):
            address = fields[1].decode("ascii", "replace") if len(fields) > 1 else "?"
            logger.info("refused a connection from %s: unknown key %s", address, key or "(none)")
            return [*head, b"400", b"unknown key", b"", b""]
        # What is behind the text becomes the User-Id of each message of the connection.
        return [*head, b"200", b"OK", key.encode(), _metadata(os.urandom(_RANDOM_BYTES).hex().encode())]


def _key(fields: list[bytes]) -> str | None:
    """Public key that a client has proved to own the secret of; None if the request is unsound."""
    if fields[_FIELDS - 1 :] == [b"NULL"]:
        return ANYBODY.key
    if len(fields) != _FIELDS + 1 or fields[3] != b"CURVE" or len(fields[4]) != _KEY_BYTES:
        return None
    return z85.encode(fields[4]).decode("ascii")
