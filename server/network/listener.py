"""Listener: binds the server's ROUTER socket, and authenticates its connections.

ZeroMQ sends a ZAP request (RFC 27) at each handshake, over a socket inside this process, and the handshake waits for
the answer. A separate thread answers in time, however busy the server's loop is.

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

from server.network import ipc_path
from server.security.access import ANONYMOUS
from server.security.keygen import check_curve
from server.security.quota import Quota
from statsd_bn import keys, limits
from statsd_bn.endpoints import check_endpoint
from statsd_bn.errors import BindError

# Maximum wait for a frame, and so the delay before the server notices a stop request or a closed connection.
POLL_SECONDS = 0.05

# How long pending replies may take when the server stops.
LINGER_MILLISECONDS = 1000

# Unread messages per connection: a member has one or two in flight. Further ones wait at the sender, and none is lost.
# A lower mark wakes ZeroMQ's thread for every second message, which costs 10 % of a round.
RECEIVE_HIGH_WATER_MARK = 16

# Handshake timeout: a handshake takes milliseconds, or a second on a bad network.
HANDSHAKE_MILLISECONDS = 10_000

# Detects a vanished host: after 60 s of silence the system sends a keepalive every 10 s.
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

# Events of the monitor.
EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED


class Listener:
    """The ROUTER socket of all clients.

    Args:
        quota: the server's limits.
        pair: the server's keys; None without CURVE.
        is_allowed: whether to accept a public key, "" for none; called in another thread.

    Attributes:
        socket: the ROUTER.
        monitor: reports events of its connections.

    Raises:
        ConfigurationError: keys are given, and this libzmq was built without CURVE.
    """

    def __init__(self, quota: Quota, pair: keys.KeyPair | None, is_allowed: Callable[[str], bool]) -> None:
        if pair:
            check_curve()
        seed_routing_ids()
        self._context = zmq.Context()
        self._files: list[ipc_path.SocketFile] = []
        self.socket = self._context.socket(zmq.ROUTER)
        # Before `bind`, so that each connection is authenticated.
        self._authenticator = Authenticator(self._context, is_allowed)
        self.monitor = self.socket.get_monitor_socket(EVENTS)
        self._configure(quota)
        if pair:
            self._require_keys(pair)

    def bind(self, endpoint: str) -> str:
        """Listen; returns the endpoint, with the port that the system chose.

        Raises:
            BindError: the endpoint is in use or does not exist.
            ConfigurationError: the port is invalid, or another user can write to the socket's folder.
        """
        check_endpoint(endpoint)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            with ipc_path.listen(endpoint) as descriptor:
                self.socket.setsockopt(zmq.USE_FD, descriptor)
                self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BindError(
                f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0)}", endpoint=endpoint
            ) from error
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if file := ipc_path.SocketFile.at(bound):  # ZeroMQ does not remove it
            self._files.append(file)
        return bound

    def open(self) -> None:
        """Start to accept connections; call it after the last `bind`."""
        self._authenticator.open()

    def close(self) -> None:
        """Close all sockets; pending replies get LINGER_MILLISECONDS."""
        while self._files:
            self._files.pop().remove()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=LINGER_MILLISECONDS)
        # The authenticator may still hold back an answer, and `term` waits for it.
        self._authenticator.open()
        self._context.term()
        self._authenticator.join()

    def _configure(self, quota: Quota) -> None:
        # Without MANDATORY a ROUTER silently drops replies to unknown peers; with HANDOVER a peer could take over
        # another's routing id and replies.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        # With a domain ZeroMQ also authenticates connections without keys, and refuses peers of ZMTP 1 and 2.
        self.socket.zap_domain = ZAP_DOMAIN
        # Otherwise ZeroMQ accepts all connections while the authenticator is not running.
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.RCVTIMEO, int(POLL_SECONDS * 1000))
        self.socket.setsockopt(zmq.SNDHWM, quota.max_unread)
        self.socket.setsockopt(zmq.RCVHWM, min(quota.max_unread, RECEIVE_HIGH_WATER_MARK))
        self.socket.setsockopt(zmq.BACKLOG, ipc_path.BACKLOG)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        for option, value in KEEPALIVE.items():
            self.socket.setsockopt(option, value)

    def _require_keys(self, pair: keys.KeyPair) -> None:
        self.socket.curve_server = True
        self.socket.curve_publickey = pair.public.encode()
        self.socket.curve_secretkey = pair.secret.encode()


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

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"statsd_bn"

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
        self._socket.bind(ZAP_ENDPOINT)
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
