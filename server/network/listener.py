"""Listener: binds the server's ROUTER socket, and authenticates its connections.

A ZeroMQ peer may choose its own routing id; otherwise ZeroMQ assigns the next number of a counter. If another peer has
already chosen that number, libzmq aborts the process. So the authenticator assigns an unpredictable id to each
connection. ZeroMQ keeps the last id that it receives, which is the authenticator's except in rare races. For these the
counter starts at a random number. pyzmq's authenticator cannot assign ids, because its answers have no metadata.

ZeroMQ removes any file at an ipc path before it binds. So the socket is bound here, with mode 0600, and its descriptor
passed to ZeroMQ: the system refuses a path in use. Only an abandoned socket is removed.
"""

import ctypes
import errno
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import zmq
from zmq.utils import z85

from server.security.keygen import check_curve
from statsd_bn import endpoints, keys, limits
from statsd_bn.errors import BindError, ConfigurationError

logger = logging.getLogger("statsd_bn.server")

POLL_SECONDS = 0.05  # maximum wait for a frame, and so for noticing a stop request or a closed connection
LINGER_MILLISECONDS = 1000  # to send pending replies when the server stops
HANDSHAKE_MILLISECONDS = 10_000  # a handshake takes milliseconds, a second on a bad network

# Unread messages per connection: a member has one or two in flight. Further requests wait in the client; further
# answers are dropped. A lower mark wakes ZeroMQ's thread for every second message, which costs 10 % of a round.
SEND_HIGH_WATER_MARK, RECEIVE_HIGH_WATER_MARK = 64, 16

# Detects a vanished host: after 60 s of silence the system sends a keepalive every 10 s.
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}

PRIVATE_UMASK = 0o177  # for mode 0600
LOCK_SECONDS, LOCK_PAUSE_SECONDS = 5.0, 0.01  # a starting server holds the lock for a millisecond

# Errors of a file system without locks. Servers that start there at the same time may replace each other's socket.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}

# Connections that wait to be accepted, for TCP as well: after a restart all members connect at once, and the system
# retries a refused one only after a moment.
BACKLOG = 4096

EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
EVENTS |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

ZAP_ENDPOINT, ZAP_DOMAIN = "inproc://zeromq.zap.01", b"statsd_bn"

# Delay of the authenticator's answers. ZeroMQ sends its request before it reads the peer's own metadata, and keeps the
# last routing id. Without the delay the answer preceded the metadata in one of four handshakes on a busy machine.
HOLD_SECONDS = 0.001


class Listener:
    """The ROUTER socket of all clients, and the monitor of its connections."""

    # Without CURVE `pair` is None. Another thread calls `is_allowed` with the public key of a client, "" without one.
    def __init__(self, pair: keys.KeyPair | None, is_allowed: Callable[[str], bool]) -> None:
        if pair:
            check_curve()
        # ZeroMQ's counter starts from `rand()`, which ZeroMQ does not seed.
        ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))
        self._context = zmq.Context()
        self._removals = ExitStack()  # of socket files, which ZeroMQ does not remove
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
        endpoints.check_endpoint(endpoint)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            with _listen(endpoint) as descriptor:
                self.socket.setsockopt(zmq.USE_FD, descriptor)
                self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise _cannot_listen(endpoint, zmq.strerror(error.errno or 0)) from error
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if path := endpoints.ipc_path(bound):
            self._removals.callback(_remove_socket, path.absolute(), path.lstat())
        return bound

    def open(self) -> None:
        """Start to authenticate connections; call it after the last `bind`."""
        self._authenticator.is_open.set()

    def close(self) -> None:
        """Close all sockets; pending replies get LINGER_MILLISECONDS."""
        self._removals.close()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=LINGER_MILLISECONDS)
        # The authenticator may still hold back an answer, and `term` waits for it.
        self._authenticator.is_open.set()
        self._context.term()
        self._authenticator.thread.join()

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
    """The ZAP handler (RFC 27) of a context, in a thread that ends with the context."""

    # Each handshake sends a request and waits for the answer. A separate thread answers even while the server's loop is
    # busy.
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self.is_open = threading.Event()  # until it is set, requests wait
        # A REP socket would receive the next request only after an answer, so the delays would add up.
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(ZAP_ENDPOINT)
        self.thread = threading.Thread(target=self._run, name="statsd_bn authenticator", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                requests = [self._socket.recv_multipart()]
                self.is_open.wait()
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
        # This id overrides the peer's. pyzmq reads properties as text, hence the hexadecimal digits.
        metadata = _property(b"Identity", os.urandom(12).hex().encode())
        # ZeroMQ sets `__fd` only if it knows the peer's address; otherwise a peer could send a false value, hence -1.
        metadata += _property(b"__fd", b"-1")
        # The field after the text becomes the User-Id of each message of the connection.
        return [*head, b"200", b"OK", key.encode(), metadata]


def _cannot_listen(endpoint: str, why: str) -> BindError:
    return BindError(f"cannot listen on {endpoint}: {why}", endpoint=endpoint)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4) + value


# Unix sockets.


def _remove_socket(path: Path, bound: os.stat_result) -> None:
    """Remove the file of a bound socket if it is unchanged, and its folder if that was created for one job."""
    # Call it while the socket is open, so that no other server can own the path.
    with suppress(OSError):
        if os.path.samestat(path.lstat(), bound):
            path.unlink()
            endpoints.remove_job_folder(path.parent)


@contextmanager
def _listen(endpoint: str) -> Iterator[int]:
    """Listen at an ipc path; yields the socket's descriptor, or -1 for TCP, where ZeroMQ itself listens."""
    # A caller that leaves the block without an exception owns the descriptor.
    path = endpoints.ipc_path(endpoint)
    if path is None:
        yield -1
        return
    is_own = False
    with suppress(ConfigurationError):  # a path given by the user needs no private folder
        is_own = path.parent == endpoints.user_folders(os.environ)[0]
    if is_own:
        endpoints.make_private_folder(path.parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            endpoints.check_folder(path.parent)
            if path.parent.stat().st_mode & stat.S_IWGRP:
                text = "the group of %s can write to it and could replace the server's socket; chmod g-w %s"
                logger.warning(text, path.parent, path.parent)
            with _folder_lock(path.parent, endpoint):
                _remove_abandoned(path, endpoint)
                _bind(bound, path)
        except OSError as error:
            raise _cannot_listen(endpoint, error.strerror or str(error)) from error
        bound.settimeout(0)
        try:
            yield bound.fileno()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        bound.detach()


def _bind(bound: socket.socket, path: Path) -> None:
    before = os.umask(PRIVATE_UMASK)
    try:
        bound.bind(os.fsencode(path))
    finally:
        os.umask(before)
    bound.listen(BACKLOG)


@contextmanager
def _folder_lock(folder: Path, endpoint: str) -> Iterator[None]:
    """Lock a folder against other servers: between `bind` and `listen` a socket looks abandoned."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        expiry = time.monotonic() + LOCK_SECONDS
        while not _lock(descriptor):
            if time.monotonic() >= expiry:
                raise _cannot_listen(endpoint, f"another process has locked {folder} for {LOCK_SECONDS:g} s")
            time.sleep(LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _remove_abandoned(path: Path, endpoint: str) -> None:
    """Remove an abandoned socket; raise BindError for anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise _cannot_listen(endpoint, "the path exists and is no socket; remove it, or give another path")
    if _is_in_use(path):
        raise _cannot_listen(endpoint, "a running server listens there")
    path.unlink()


def _is_in_use(path: Path) -> bool:
    """Whether a process listens at a path: True unless a connection is refused or the file is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(0)
        return client.connect_ex(os.fsencode(path)) not in {errno.ECONNREFUSED, errno.ENOENT}
