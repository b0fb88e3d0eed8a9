"""Channel pools, which lend channels to threads; one thread at a time uses a channel, as ZeroMQ requires.

`ZmqChannelPool` uses sockets; `InProcessChannelPool` needs no server, for a process alone in its job.
"""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from client.session.protocol.session import ResultT, StateMachine
from statsd_bn import endpoints, limits
from statsd_bn.endpoints import HANDSHAKES, HandshakeMonitor, SocketMonitor, explain_no_answer, format_no_answer
from statsd_bn.errors import ConfigurationError, ConnectionClosed
from statsd_bn.keys import ClientKeys
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Contribution, Participation, Register, Registered, digest
from statsd_bn.reduction import join_in_order, sum_in_order
from statsd_bn.round_key import GATHER
from statsd_bn.wire import decode, encode

SHORT_MILLISECONDS = 2  # timeout of the first, cheap wait, which suffices for most rounds
WATCH_SECONDS = 0.1  # interval at which a longer wait checks for a reconnect: frames sent before it may be lost

LINGER_MILLISECONDS = 1000  # timeout for the last frames to leave when the connection closes
CLOSE_SECONDS = 3.0  # timeout of closing a pool, and of the probe of a silent server

CONNECT_MILLISECONDS = 1000  # timeout of an attempt to connect; TCP itself resends a lost SYN after 1, 3 and 7 s
# Pause before the heartbeats' socket reconnects; the server declares a member lost 300 ms after a disconnect.
RECONNECT_MILLISECONDS = 50

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_NOBLOCK = int(zmq.NOBLOCK)  # a plain integer, which is quicker than pyzmq's flag

# Endpoint of a connection without a server, and the server ID and members in the answers of its channels.
IN_PROCESS = "in process"
_SERVER = bytes(limits.TOKEN_BYTES - 1) + b"\1"
_ONLY = Members.of([0])


class Channel:
    """A way to the server for one thread; the end of a `with` block returns it to its pool, or closes it on errors."""

    idle: deque["Channel"]  # the idle channels of its pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.idle.append(self)
            return
        self.close()  # a reused channel could deliver a late answer to the failed request
        if isinstance(error, zmq.ContextTerminated):
            raise _closed() from error

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting; it may be lost."""
        raise NotImplementedError

    def receive(self, seconds: float) -> bytes | None:
        """Return the next frame, or None after a reconnect or the timeout, which may be exceeded by 0.1 s."""
        raise NotImplementedError

    def receive_nowait(self) -> bytes | None:
        """Return the next frame if one is there, else None."""
        return self.receive(0.0)

    def close(self) -> None:
        """Close the channel; frames sent before still leave."""


def run_state_machine(machine: StateMachine[ResultT], channel: Channel) -> ResultT:
    """Run a state machine on a channel and return its result."""
    monotonic = time.monotonic
    frames, due, result = machine.begin(monotonic())
    while True:
        for frame in frames:
            channel.send(frame)
        if result is not None:
            return result
        answer = channel.receive(due - monotonic())
        frames, due, result = machine.step(monotonic(), answer)


class ChannelPool:
    """A pool of channels to one server."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._idle: deque[Channel] = deque()  # `append` and `pop` are thread-safe without a lock

    def channel(self) -> Channel:
        """Lend a channel to the calling thread, for a `with` block."""
        try:
            return self._idle.pop()
        except IndexError:
            pass
        channel = self._open()
        channel.idle = self._idle
        return channel

    def heartbeat_socket(self) -> "HeartbeatSocket | None":
        """Open a socket for heartbeats, to be closed before the pool; None without a server."""
        return None

    def diagnose_silence(self, seconds: float) -> str:
        """Return the text of an error about a server that has not answered for `seconds`."""
        return format_no_answer(self.endpoint, seconds)

    @property
    def is_gone(self) -> bool:
        """Whether no server can start at the endpoint any more, for example because rank 0 removed the job's folder."""
        return False

    def close_idle(self) -> None:
        """Close the idle channels, which would only burden a restarted server with connections."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def close(self) -> None:
        """Close all idle channels."""
        self.close_idle()

    def _open(self) -> Channel:
        raise NotImplementedError


class ZmqChannelPool(ChannelPool):
    """Channels over ZeroMQ DEALER sockets."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        super().__init__(endpoint)
        self._keys = keys
        self._handshakes = HandshakeMonitor(endpoint, has_key=keys is not None)
        self._context = zmq.Context()
        self._is_closed = False
        try:
            with self.channel():
                pass
        except ConfigurationError:
            self._context.term()
            raise

    def heartbeat_socket(self) -> "HeartbeatSocket":
        """Open a socket for heartbeats, to be closed before the pool."""
        return HeartbeatSocket(self._context, self.endpoint, self._keys)

    @property
    def is_gone(self) -> bool:
        """Whether the endpoint's folder was made for one job and is gone."""
        path = endpoints.ipc_path(self.endpoint)
        return path is not None and path.parent.name.startswith(endpoints.JOB_PREFIX) and not path.parent.exists()

    def diagnose_silence(self, seconds: float) -> str:
        """Try a plain connection, for `CLOSE_SECONDS` at most, and return an error text with its result."""
        found = [super().diagnose_silence(seconds)]
        _run_briefly("statsd_bn probe", lambda: found.append(explain_no_answer(self.endpoint, seconds, socket)))
        return found[-1]

    def close(self) -> None:
        """Close all sockets; the last frames have up to 1 s to leave."""
        self._is_closed = True
        super().close()
        _run_briefly("statsd_bn close", self._context.term)

    def _open(self) -> Channel:
        try:
            return _ZmqChannel(self._context, self.endpoint, self._keys, self._handshakes)
        except zmq.ZMQError as error:
            if self._is_closed:
                raise _closed() from error
            raise


def _run_briefly(name: str, call: Callable[[], object]) -> None:
    """Run a call in a thread, and wait for it up to `CLOSE_SECONDS`: a name server may delay it by 30 s."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)


class _ZmqChannel(Channel):
    def __init__(self, context: Context, endpoint: str, keys: ClientKeys | None, handshakes: HandshakeMonitor) -> None:
        self._socket = new_socket(context, endpoint, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVTIMEO, SHORT_MILLISECONDS)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKES)
        self._handshakes = SocketMonitor(handshakes)
        try:
            endpoints.check_endpoint(endpoint)
            secure(self._socket, keys)
            self._socket.connect(endpoint)
        except (ConfigurationError, zmq.ContextTerminated):
            self.close(linger=0)
            raise
        except zmq.ZMQError as error:
            self.close(linger=0)
            raise ConfigurationError(
                f"endpoint: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r} ({zmq.strerror(error.errno or 0)})"
            ) from error

    def send(self, frame: bytes) -> None:
        # Waiting for space in a full queue could last as long as the server is away. A dropped frame is like one that
        # the network lost: its request is repeated.
        with suppress(zmq.Again):
            self._socket.send(frame, _NOBLOCK)

    def receive(self, seconds: float) -> bytes | None:
        expiry = time.monotonic() + seconds
        # `recv` with a short timeout takes fewer system calls than `poll` and then `recv`.
        if (frame := self._receive(0)) is not None:
            return frame
        while True:
            if self._socket.poll(int(WATCH_SECONDS * 1000)) and (frame := self.receive_nowait()) is not None:
                return frame
            if time.monotonic() >= expiry or self._has_reconnected():
                return None

    def receive_nowait(self) -> bytes | None:
        return self._receive(_NOBLOCK)

    def close(self, linger: int | None = None) -> None:
        with suppress(zmq.ZMQError):  # if the context is terminated
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger)

    def _receive(self, flags: int) -> bytes | None:
        try:
            return self._socket.recv(flags)
        except zmq.Again:
            return None

    def _has_reconnected(self) -> bool:
        before = self._handshakes.successes
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            self._handshakes.on_event(time.monotonic(), int(message["event"]), int(message["value"]))
        return 0 < before < self._handshakes.successes


class HeartbeatSocket:
    """A socket that sends frames at once or drops them; one thread uses it, but any thread may call `wake`."""

    # The socket lives as long as the connection, so the server can always reach a live process over it.

    def __init__(self, context: Context, endpoint: str, keys: ClientKeys | None = None) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._socket = new_socket(context, endpoint, linger=0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue without a connection
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        secure(self._socket, keys)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._reader):
            self._poller.register(readable, zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """Send a frame if it can leave now; return whether it could."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def is_connected(self) -> bool:
        """Whether a frame could leave now."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def wait(self, seconds: float) -> bool:
        """Wait for a connection, a frame, a `wake` or the timeout; return whether the socket has connected."""
        ready = dict(self._poller.poll(max(0, math.ceil(seconds * 1000))))
        with suppress(BlockingIOError):
            self._reader.recv(64)
        return self._monitor in ready and bool(self._drain(self._monitor))

    def received(self) -> list[bytes]:
        """Return the frames that have arrived."""
        return self._drain(self._socket)

    def wake(self) -> None:
        """End a `wait`; any thread may call this."""
        with suppress(OSError):  # a full buffer wakes the thread anyway; no thread waits on a closed socket
            self._writer.send(b"\0")

    def close(self) -> None:
        """Close all of its sockets."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._reader.close()
        self._writer.close()

    @staticmethod
    def _drain(readable: "zmq.Socket[bytes]") -> list[bytes]:
        frames = []
        with suppress(zmq.Again):
            while True:
                frames.append(readable.recv_multipart(zmq.NOBLOCK)[-1])
        return frames


def new_socket(context: Context, endpoint: str, linger: int) -> zmq.Socket[bytes]:
    """Return a socket to be connected to an endpoint; `linger` in milliseconds."""
    found = context.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, linger)
    found.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
    found.setsockopt(zmq.IPV6, int("[" in endpoint))
    return found


def secure(socket: "zmq.Socket[bytes]", keys: ClientKeys | None) -> None:
    """Set a socket's CURVE keys, before it connects; do nothing without keys."""
    if keys is None:
        return
    if not zmq.has("curve"):
        raise ConfigurationError(f"curve: libzmq {zmq.zmq_version()} was built without it; install pyzmq from a wheel")
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey = keys.pair.public.encode()
    socket.curve_secretkey = keys.pair.secret.encode()


def _closed() -> ConnectionClosed:
    """Error for a thread that ZeroMQ wakes because another thread terminated the context."""
    return ConnectionClosed("the connection was closed by another thread while this one waited")


class InProcessChannelPool(ChannelPool):
    """Channels to a stand-in for the server of a strict job with one member, such as a notebook."""

    def __init__(self) -> None:
        super().__init__(IN_PROCESS)

    def _open(self) -> Channel:
        return _InProcessChannel()


class _InProcessChannel(Channel):
    def __init__(self) -> None:
        self._answers: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Register):
            # A member that rejoins begins at a new step.
            is_rejoining = message.participation == Participation.REJOINING
            first_step = message.step + 1 if is_rejoining else message.first_step
            answer = Registered(digest(message.session), _SERVER, message.epoch, first_step, 0, _ONLY)
            self._answers.append(encode(answer))
        elif isinstance(message, Contribution):
            rows = message.rows
            combine = join_in_order if message.key.phase == GATHER else sum_in_order
            aggregate = Aggregate(message.key, len(rows.counts), sum(rows.counts), _ONLY, combine(rows.values))
            self._answers.append(encode(aggregate))

    def receive(self, seconds: float) -> bytes | None:
        if self._answers:
            return self._answers.popleft()
        time.sleep(max(0.0, seconds))  # no answer can arrive: `send` has already added all answers
        return None
