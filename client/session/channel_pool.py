"""Channel pool: how frames travel between a member and its server.

The interface is small: a channel pool lends out *channels*, and a channel sends a frame and waits for one. A channel
belongs to one thread while it is lent, which is all that ZeroMQ asks for, so threads that exchange at the same
time hold a channel each and never wait for one another. `ZmqChannelPool` goes over a socket, `MemoryChannelPool` calls
a function; tests and demos use it to run several members in one process.
"""

import itertools
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from client.session.heartbeat_socket import CONNECT_MILLISECONDS, Beacon, secure
from client.session.protocol.session import Machine, ResultT, Turn
from statsd_bn import limits
from statsd_bn.endpoints import JOB_PREFIX, check_endpoint, ipc_path, silent, why_silent
from statsd_bn.errors import ConfigurationError, ConnectionClosed
from statsd_bn.handshake import EVENTS, Handshakes
from statsd_bn.keys import ClientKeys
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Contribution, Message, Participation, Register, Registered
from statsd_bn.reduction import join_in_order, sum_in_order
from statsd_bn.round_key import GATHER
from statsd_bn.tokens import digest
from statsd_bn.wire import decode, encode

# A wait that is over so soon does without what a longer one needs; most are.
SHORT_SECONDS = 0.002

# How often a longer wait looks whether the connection broke and was made again: what was sent before is lost then.
WATCH_SECONDS = 0.1

# As a plain integer, which is quicker than pyzmq's flag.
_AT_ONCE = int(zmq.NOBLOCK)

_WATCH_MILLISECONDS = int(WATCH_SECONDS * 1000)

# What a connection that needs no server calls its endpoint; and the life of its server, which is that of the process.
IN_PROCESS = "in process"
_SERVER = bytes(limits.TOKEN_BYTES - 1) + b"\1"
_ONLY = Members.of([0])

# How long a goodbye may take to leave when the connection closes, and all of the closing.
LINGER_MILLISECONDS = 1000
CLOSE_SECONDS = 3.0


class Channel(Protocol):
    """A way to the server for one thread at a time."""

    def send(self, frame: bytes) -> None:
        """Sends a frame, and does not wait; it may be lost."""

    def receive_soon(self) -> bytes | None:
        """Returns the next frame if one comes within `SHORT_SECONDS`, else None."""

    def receive(self, seconds: float) -> bytes | None:
        """Returns the next frame, or None if none came in time, or the server has come back meanwhile.

        The time is kept to a tenth of a second.

        Raises:
            AuthenticationRefused: server and client do not accept each other's keys.
        """

    def look(self) -> bytes | None:
        """Returns the next frame if one is there; never waits."""

    def close(self) -> None:
        """Closes the channel; frames sent before still leave."""


def run_machine(machine: Machine[ResultT], channel: Channel) -> ResultT:
    """Runs a machine to its end and returns its result.

    Raises:
        StatsdBNError: how the machine ended otherwise.
        ConnectionClosed: another thread closed the channel pool.
    """
    monotonic = time.monotonic
    turn = machine.begin(monotonic())
    _send(turn, channel)
    if turn[2] is None and (answer := channel.receive_soon()) is not None:
        turn = machine.step(monotonic(), answer)
        _send(turn, channel)
    _, due, result = turn
    while result is None:
        answer = channel.receive(due - monotonic())
        turn = machine.step(monotonic(), answer)
        _send(turn, channel)
        _, due, result = turn
    return result


def _send(turn: Turn[ResultT], channel: Channel) -> None:
    for frame in turn[0]:
        channel.send(frame)


class Loan:
    """A channel that is lent for the time of a `with` block; a class, since a generator takes twice as long."""

    __slots__ = ("_channel", "_idle")

    def __init__(self, channel: Channel, idle: deque[Channel]) -> None:
        self._channel = channel
        self._idle = idle

    def __enter__(self) -> Channel:
        return self._channel

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._idle.append(self._channel)
        else:
            self._channel.close()


class ChannelPool:
    """A pool of channels to one server.

    A channel that saw an error is closed rather than lent again: a late answer may still come through it.
    """

    def __init__(self, endpoint: str, key: str = "") -> None:
        self.endpoint = endpoint
        # This client's public key; empty for a server that asks for none.
        self.key = key
        # Its ends are safe to use from any thread, without a lock.
        self._idle: deque[Channel] = deque()

    def channel(self) -> "Loan":
        """Lends a channel to the calling thread, for a `with` block."""
        return Loan(self._taken() or self._open(), self._idle)

    def beacon(self) -> Beacon | None:
        """Opens a way for signs of life; None where the server needs none, because it lives in this process."""
        return None

    def why_silent(self, seconds: float) -> str:
        """Returns why nobody has answered for so long, as the text of an error."""
        return silent(self.endpoint, seconds)

    @property
    def is_gone(self) -> bool:
        """Whether no server can be started here any more, as in the folder of a job whose rank 0 has ended."""
        return False

    def close_idle(self) -> None:
        """Closes the channels that nobody has borrowed; whoever needs one opens another.

        To a server that was started again they would connect too, and have nothing to say to it.
        """
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def close(self) -> None:
        """Closes all idle channels."""
        self.close_idle()

    def _taken(self) -> Channel | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _open(self) -> Channel:
        raise NotImplementedError


class ZmqChannelPool(ChannelPool):
    """Channels over ZeroMQ DEALER sockets.

    Raises:
        ConfigurationError: `endpoint` is not an endpoint.
    """

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        super().__init__(endpoint, keys.pair.public if keys else "")
        self._keys = keys
        self._handshakes = Handshakes(endpoint, has_key=keys is not None)
        self._context = zmq.Context()
        self._is_closed = False
        try:
            with self.channel():
                pass
        except ConfigurationError:
            self._context.term()
            raise

    def beacon(self) -> Beacon:
        """Opens a socket for signs of life; whoever asks for it closes it before the channel pool."""
        return Beacon(self._context, self.endpoint, self._keys)

    @property
    def is_gone(self) -> bool:
        """Whether the folder is gone that was made for a server of one job."""
        path = ipc_path(self.endpoint)
        return path is not None and path.parent.name.startswith(JOB_PREFIX) and not path.parent.exists()

    def why_silent(self, seconds: float) -> str:
        """Tries a plain connection, for a few seconds at most."""
        found = [super().why_silent(seconds)]
        # Like ZeroMQ's thread below, it may be asking for a name that nobody answers for.
        probe = threading.Thread(
            target=lambda: found.append(why_silent(self.endpoint, seconds, socket)), name="statsd_bn probe", daemon=True
        )
        probe.start()
        probe.join(CLOSE_SECONDS)
        return found[-1]

    def close(self) -> None:
        """Closes all sockets; the last frames have a moment to leave."""
        self._is_closed = True
        super().close()
        # It waits for ZeroMQ's thread, which may be asking for a name that nobody answers for, 30 seconds long.
        ending = threading.Thread(target=self._context.term, name="statsd_bn close", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def _open(self) -> Channel:
        try:
            return _ZmqChannel(self._context, self.endpoint, self._keys, self._handshakes)
        except zmq.ZMQError as error:
            if self._is_closed:
                raise _closed() from error
            raise


class _ZmqChannel:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ClientKeys | None,
        handshakes: Handshakes,
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.RCVTIMEO, int(SHORT_SECONDS * 1000))
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._handshakes = handshakes.socket()
        try:
            check_endpoint(endpoint)
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
        # The wait for room in a full queue has no end while the server is away. What is dropped is lost as on the
        # network, and asked again.
        try:
            self._socket.send(frame, _AT_ONCE)
        except zmq.Again:
            pass
        except zmq.ContextTerminated as error:
            raise _closed() from error

    def receive_soon(self) -> bytes | None:
        # Waiting in `recv` costs some system calls less than polling before it.
        return self._received(0)

    def receive(self, seconds: float) -> bytes | None:
        expiry = time.monotonic() + seconds
        while True:
            try:
                if self._socket.poll(_WATCH_MILLISECONDS) and (frame := self.look()) is not None:
                    return frame
                if time.monotonic() >= expiry or self._is_connected_anew():
                    return None
            except zmq.ContextTerminated as error:
                raise _closed() from error

    def look(self) -> bytes | None:
        return self._received(_AT_ONCE)

    def close(self, linger: int | None = None) -> None:
        with suppress(zmq.ZMQError):  # of a terminated context
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger)

    def _received(self, flags: int) -> bytes | None:
        try:
            return self._socket.recv(flags)
        except zmq.Again:
            return None
        except zmq.ContextTerminated as error:
            raise _closed() from error

    def _is_connected_anew(self) -> bool:
        before = self._handshakes.successes
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            self._handshakes.take(time.monotonic(), int(told["event"]), int(told["value"]))
        return 0 < before < self._handshakes.successes


def _closed() -> ConnectionClosed:
    """Another thread closed the connection: ZeroMQ wakes whoever waits on a socket of a terminated context."""
    return ConnectionClosed("the connection was closed by another thread while this one waited")


class MemoryChannelPool(ChannelPool):
    """Channels that call a server in the same process; many members may share one.

    Args:
        receive: takes a peer and a frame, returns the frames to send as (peer, frame) pairs; called under a lock.
    """

    def __init__(
        self, receive: Callable[[bytes, bytes], Iterable[tuple[bytes, bytes]]], endpoint: str = "memory://"
    ) -> None:
        super().__init__(endpoint)
        self._receive = receive
        self._master = threading.Lock()
        # No SimpleQueue: in Python 3.11 one that waits with a timeout waits for ever, if a signal comes and its handler
        # outlasts the timeout.
        self._inboxes: dict[bytes, queue.Queue[bytes]] = {}
        # Threads open channels at the same time, and each needs a number of its own.
        self._numbers = itertools.count()

    def deliver(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        """Puts frames into their peers' inboxes."""
        for peer, frame in replies:
            if peer in self._inboxes:
                self._inboxes[peer].put(frame)

    def _open(self) -> Channel:
        peer = next(self._numbers).to_bytes(4, "big")
        self._inboxes[peer] = queue.Queue()
        return _MemoryChannel(self, peer, self._inboxes[peer])

    def _call(self, peer: bytes, frame: bytes) -> None:
        with self._master:
            self.deliver(self._receive(peer, frame))


class _MemoryChannel:
    def __init__(self, channel_pool: MemoryChannelPool, peer: bytes, inbox: queue.Queue[bytes]) -> None:
        self._channel_pool = channel_pool
        self._peer = peer
        self._inbox = inbox

    def send(self, frame: bytes) -> None:
        self._channel_pool._call(self._peer, frame)  # noqa: SLF001 - the two halves of one class

    def receive_soon(self) -> bytes | None:
        return self.receive(SHORT_SECONDS)

    def receive(self, seconds: float) -> bytes | None:
        try:
            return self._inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def look(self) -> bytes | None:
        return self.receive(0.0)

    def close(self) -> None:
        pass


def own_channel_pool() -> MemoryChannelPool:
    """Returns what a connection of one asks instead of a server: this process answers as to a strict job's only member.

    A plain script, a notebook or a debugger has nobody to exchange with, and needs no server for that. But all that a
    connection can do has to work there as anywhere else, so such a connection goes the usual way, with the same frames.
    """

    def receive(peer: bytes, frame: bytes) -> list[tuple[bytes, bytes]]:
        answer = _answer(decode(frame))
        return [] if answer is None else [(peer, encode(answer))]

    return MemoryChannelPool(receive, IN_PROCESS)


def _answer(message: Message) -> Registered | Aggregate | None:
    if isinstance(message, Register):
        return _registered(message)
    if isinstance(message, Contribution):
        return _reduced(message)
    return None


def _registered(message: Register) -> Registered:
    # Whoever is back from an absence begins a step of its own.
    first_step = message.step + 1 if message.participation == Participation.REJOINING else message.first_step
    return Registered(digest(message.session), _SERVER, message.epoch, first_step, 0, _ONLY)


def _reduced(message: Contribution) -> Aggregate:
    rows = message.rows
    combine = join_in_order if message.key.phase == GATHER else sum_in_order
    return Aggregate(message.key, len(rows.counts), sum(rows.counts), _ONLY, combine(rows.values))
