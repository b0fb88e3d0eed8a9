"""ZAP: authenticates connections for ZeroMQ (RFC 27), and assigns their routing ids.

ZeroMQ sends a request at each handshake, over a socket inside this process, and the handshake waits for the answer. A
separate thread answers in time, however busy the server's loop is.

A ZeroMQ peer may choose its own routing id; otherwise ZeroMQ assigns the next number of a counter. If another peer has
already chosen that number, libzmq aborts the process. So the authenticator assigns an unpredictable id to each
connection. ZeroMQ keeps the last id that it receives, which is the authenticator's except in rare races. For these the
counter starts at a random number. pyzmq's authenticator cannot do this, because its answers have no metadata.
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

from server.security.access import ANONYMOUS

# 96 bits, in hexadecimal because pyzmq reads properties as text.
_RANDOM_BYTES = 12


def seed_routing_ids() -> None:
    """Seed libc's `rand()`, which ZeroMQ's counter starts from without seeding it; call it before the first socket."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))


def _metadata(routing_id: bytes) -> bytes:
    """Metadata for a connection; it overrides the peer's.

    ZeroMQ has set the real descriptor before, unless it does not know the peer's address.
    """
    return _property(b"Identity", routing_id) + _property(b"__fd", b"-1")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


logger = logging.getLogger("statsd_bn.server")

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"statsd_bn"

# Requests come as from a REQ socket: routing id, empty frame, content.
_ENVELOPE = 2

# Fields after a request's version and number: domain, address, routing id, mechanism, and the key with CURVE.
_FIELDS = 4
_KEY_BYTES = 32

# Delay of the answers. ZeroMQ sends its request before it reads the peer's own metadata, and keeps the last routing id.
# Without the delay the answer came first in one of four handshakes on a busy machine.
HOLD_SECONDS = 0.001


class Authenticator:
    """The ZAP handler of a context, in a thread that ends with it.

    Args:
        context: context of the listening socket.
        is_allowed: whether to accept a public key, "" for none; called from the thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._is_open = threading.Event()
        # A REP would receive the next request only after an answer, so the delays would add up.
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="statsd_bn authenticator", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Start to answer, including requests that wait already."""
        self._is_open.set()

    def join(self) -> None:
        """Wait for the end of the thread, after its context was terminated."""
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
        # The field after the text becomes the User-Id of each message of the connection.
        return [*head, b"200", b"OK", key.encode(), _metadata(os.urandom(_RANDOM_BYTES).hex().encode())]


def _key(fields: list[bytes]) -> str | None:
    """Public key of an authenticated client; None if the request is malformed."""
    if fields[_FIELDS - 1 :] == [b"NULL"]:
        return ANONYMOUS.key
    if len(fields) != _FIELDS + 1 or fields[3] != b"CURVE" or len(fields[4]) != _KEY_BYTES:
        return None
    return z85.encode(fields[4]).decode("ascii")
