"""Listener: binds the server's ROUTER socket, and authenticates its connections.

A ZeroMQ peer may choose its own routing id; otherwise ZeroMQ assigns the next number of a counter. If another peer has
already chosen that number, libzmq aborts the process. So the authenticator assigns an unpredictable id to each
connection. ZeroMQ keeps the last id that it receives, which is the authenticator's except in rare races. For these the
counter starts at a random number. pyzmq's authenticator cannot do this, because its answers have no metadata.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import zmq
from zmq.utils import z85

from server.network.ipc_path import BACKLOG, listen, remove_socket
from server.security.keygen import check_curve
from statsd_bn import keys, limits
from statsd_bn.endpoints import check_endpoint, ipc_path
from statsd_bn.errors import BindError

logger = logging.getLogger("statsd_bn.server")

# Maximum wait for a frame, and so the delay before the server notices a stop request or a closed connection.
POLL_SECONDS = 0.05

LINGER_MILLISECONDS = 1000  # of pending replies when the server stops

# Unread messages per connection: a member has one or two in flight. Further ones from a client wait there, and none is
# lost. A lower mark wakes ZeroMQ's thread for every second message, which costs 10 % of a round.
SEND_HIGH_WATER_MARK = 64
RECEIVE_HIGH_WATER_MARK = 16

HANDSHAKE_MILLISECONDS = 10_000  # it takes milliseconds, or a second on a bad network

# Detects a vanished host: after 60 s of silence the system sends a keepalive every 10 s.
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}

# Events of the monitor.
EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
EVENTS |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"statsd_bn"

# Delay of the authenticator's answers. ZeroMQ sends its request before it reads the peer's own metadata, and keeps the
# last routing id. Without the delay the answer came first in one of four handshakes on a busy machine.
HOLD_SECONDS = 0.001


class Listener:
    """The ROUTER socket of all clients, and the monitor of its connections.

    Without CURVE `pair` is None. Another thread calls `is_allowed` with the public key of a client, "" without one.
    """

    def __init__(self, pair: keys.KeyPair | None, is_allowed: Callable[[str], bool]) -> None:
        if pair:
            check_curve()
        # ZeroMQ's counter starts from `rand()`, which ZeroMQ does not seed.
        ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))
        self._context = zmq.Context()
        self._removals: list[Callable[[], None]] = []  # of socket files, which ZeroMQ does not remove
        self.socket = self._context.socket(zmq.ROUTER)
        # Before `bind`, so that each connection is authenticated.
        self._authenticator = Authenticator(self._context, is_allowed)
        self.monitor = self.socket.get_monitor_socket(EVENTS)
        self._configure()
        if pair:
            self.socket.curve_server = True
            self.socket.curve_publickey = pair.public.encode()
            self.socket.curve_secretkey = pair.secret.encode()

    def bind(self, endpoint: str) -> str:
        """Listen; returns the endpoint, with the port that the system chose."""
        check_endpoint(endpoint)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            with listen(endpoint) as descriptor:
                self.socket.setsockopt(zmq.USE_FD, descriptor)
                self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            text = f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0)}"
            raise BindError(text, endpoint=endpoint) from error
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if path := ipc_path(bound):
            self._removals.append(partial(remove_socket, path.absolute(), path.lstat()))
        return bound

    def open(self) -> None:
        """Start to accept connections; call it after the last `bind`."""
        self._authenticator.open()

    def close(self) -> None:
        """Close all sockets; pending replies get LINGER_MILLISECONDS."""
        while self._removals:
            self._removals.pop()()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=LINGER_MILLISECONDS)
        # The authenticator may still hold back an answer, and `term` waits for it.
        self._authenticator.open()
        self._context.term()
        self._authenticator.join()

    def _configure(self) -> None:
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
        self.socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        for option, value in KEEPALIVE.items():
            self.socket.setsockopt(option, value)


class Authenticator:
    """The ZAP handler (RFC 27) of a context, in a thread that ends with it.

    ZeroMQ sends it a request at each handshake, which waits for the answer. So it answers in a thread, however busy the
    server's loop is.
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
        # Routing id, empty frame, version, number; then domain, address, the peer's routing id, mechanism, key.
        head, (_, address, _, mechanism, *credentials) = request[:4], request[4:]
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        if not self._is_allowed(key):
            logger.info(
                "refused a connection from %s: unknown key %s", address.decode("ascii", "replace"), key or "(none)"
            )
            return [*head, b"400", b"unknown key", b"", b""]
        # It overrides the peer's metadata. pyzmq reads properties as text, hence the hexadecimal id.
        metadata = _property(b"Identity", os.urandom(12).hex().encode())
        # ZeroMQ has set the real descriptor before, unless it does not know the peer's address.
        metadata += _property(b"__fd", b"-1")
        # The field after the text becomes the User-Id of each message of the connection.
        return [*head, b"200", b"OK", key.encode(), metadata]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4) + value
