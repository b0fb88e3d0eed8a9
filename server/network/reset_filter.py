"""Reset filter: keeps broken TCP connections from ending the server inside libzmq.

libzmq reads a connection until the queue of received messages is full. What it has read beyond stays in the buffer of
the decoder, and reading stops. If the connection breaks then, libzmq notes an I/O error and keeps the buffer, so that
no received message is lost. Once the server has taken messages from the queue, decoding goes on. Decoding answers a
ZMTP heartbeat (PING) at once, by a write to the connection, and the write asserts that no I/O error was noted
(`zmq_assert (!_io_error)` in stream_engine_base.cpp). The assertion aborts the process.

So one PING ends the server for all jobs, if it is buffered behind a full queue when its connection breaks. Ordinary
ranks set no ZeroMQ heartbeats and never send a PING, and however they are killed they do no harm. But a peer with a key
may send PINGs, by a heartbeat option that it set itself, or on purpose.

A connection breaks when the peer resets it, or when both of its directions are shut down. The end of one direction is
read in its turn, behind the buffer, and does no harm. So on Linux the server

- attaches a socket filter to each TCP connection that drops segments with the reset flag (`let_no_reset_through`);
- ends a connection itself by shutting down the direction that it reads from (`hang_up`);
- finds out which connections were reset, since libzmq no longer sees it (`Resets`).

Resets matter: a process that is killed before it has read everything resets its connections, and the server would
notice only the silence. The system counts the segments that the filter drops. But a count that rises proves nothing:
anybody who knows the two addresses and guesses a port can forge a reset. TCP would detect it by its sequence number
(RFC 5961), which the filter cannot. Other segments are dropped too. So the server sends a frame. The system of a
living peer acknowledges it, even if the process is frozen; if the connection is gone, all that comes back is another
reset.

Unix sockets have no filter. Their peers are processes of the same user.
"""

import ctypes
import logging
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger("statsd_bn.server")

# On Linux; Python's socket has no names for them.
_ATTACH_FILTER, _MEMORY_INFO = 26, 55

# The system tells nine numbers about a socket's memory; the last counts what it has dropped.
_MEMORY = struct.Struct("9I")

# The first numbers of what it tells of a TCP connection, in milliseconds, the time of a round trip in microseconds.
_TCP = struct.Struct("=8x 4x4x4x4x I 4x4x4x4x 4x4x I I 4x4x I")

# Where a TCP header has its length and its flags, and the flag of a reset.
_LENGTH, _FLAGS, _RESET = 12, 13, 0x04

# Instructions of the classic Berkeley Packet Filter, which the system runs on each segment, as
# (code, jump if true, jump if false, operand).
_DROP, _TAKE = (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)
_NO_RESETS = (
    (0x30, 0, 0, _FLAGS),  # load the byte
    (0x45, 0, 1, _RESET),  # drop if the flag is set
    _DROP,
    _TAKE,
)
_NOTHING_NEW = (
    (0x30, 0, 0, _FLAGS),
    (0x45, 6, 0, _RESET),
    (0x30, 0, 0, _LENGTH),
    (0x74, 0, 0, 2),  # its upper half counts words of 4 bytes
    (0x54, 0, 0, 0x3C),
    (0x07, 0, 0, 0),  # keep it
    (0x80, 0, 0, 0),  # load the length of the segment
    (0x1D, 1, 0, 0),  # take it if there is only a header
    _DROP,
    _TAKE,
)

# How long a system may take to acknowledge, beside the way there and back: at most a fifth of a second.
ANSWER_SECONDS = 0.25

# The system counts time in steps of up to ten milliseconds, and an answer may come in the same step as the frame.
_STEPS_SECONDS = 0.02


def let_no_reset_through(descriptor: int) -> bool:
    """Keep resets from a TCP connection, or from all that a listening socket accepts; returns whether it could.

    A peer that has reset its connection then looks like one whose host has vanished; `Resets` tells them apart.
    """
    try:
        with _borrowed(descriptor) as found:
            return _is_tcp(found) and _attach(found, _NO_RESETS)
    except OSError:  # it has been closed meanwhile
        return False


def hang_up(descriptor: int) -> None:
    """End a connection: ZeroMQ reads what has come, then finds the end and closes it."""
    with _borrowed(descriptor) as found:
        # Otherwise ZeroMQ would go on reading what comes after, before it finds the end.
        is_quiet = not _is_tcp(found) or _attach(found, _NOTHING_NEW)
        found.shutdown(socket.SHUT_RD if is_quiet else socket.SHUT_RDWR)


def dropped(descriptor: int) -> int:
    """How many segments of a connection the system has dropped, resets among them; 0 if it does not tell."""
    if sys.platform != "linux":
        return 0
    try:
        # Faster than `_borrowed`, which asks the system for the kind of socket; that does not matter here.
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            drops: int = _MEMORY.unpack(found.getsockopt(socket.SOL_SOCKET, _MEMORY_INFO, _MEMORY.size))[-1]
        finally:
            found.detach()
    except (OSError, struct.error):  # it has been closed meanwhile, or the system is too old
        return 0
    return drops


@dataclass(frozen=True, slots=True)
class Answers:
    """How the other end of a TCP connection answers, in seconds.

    Attributes:
        is_awaited: whether it has not acknowledged all that was sent to it.
        silence: how long nothing has come, neither data nor an acknowledgement.
        round_trip: how long its answers took before.
    """

    is_awaited: bool
    silence: float
    round_trip: float


def answers(descriptor: int) -> Answers | None:
    """How the other end of a TCP connection answers; None if the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        with _borrowed(descriptor) as found:
            told = _TCP.unpack(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP.size))
    except (OSError, struct.error):  # it has been closed meanwhile, or stands for something else
        return None
    unacknowledged, data_milliseconds, acknowledgement_milliseconds, round_trip = told
    silence = min(data_milliseconds, acknowledgement_milliseconds) / 1e3
    return Answers(unacknowledged > 0, silence, round_trip / 1e6)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that stays ZeroMQ's; opens no further descriptor, since none may be left."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def _is_tcp(found: socket.socket) -> bool:
    return sys.platform == "linux" and found.family in {socket.AF_INET, socket.AF_INET6}


def _attach(found: socket.socket, program: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Have the system run a filter on what comes; returns whether this system can."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    try:
        found.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))
    except OSError as error:
        logger.debug("resets are let through: %s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A connection that may have been reset.

    Attributes:
        since: when that was noticed, and a frame was sent.
        dropped: what the system had dropped by then.
    """

    since: float
    dropped: int


class Resets:
    """Connections by file descriptor.

    Args:
        dropped: returns how many segments of a connection the system has dropped.
        answers: returns how the other end answers.
    """

    def __init__(
        self, dropped: Callable[[int], int] = dropped, answers: Callable[[int], Answers | None] = answers
    ) -> None:
        self._dropped = dropped
        self._answers = answers
        self._known: dict[int, int] = {}
        self._suspicions: dict[int, _Suspicion] = {}

    def ended(self, descriptor: int) -> None:
        """Note the end of a connection."""
        self._known.pop(descriptor, None)
        self._suspicions.pop(descriptor, None)

    def suspects(self, now: float, descriptors: Iterable[int]) -> list[int]:
        """Those of some connections that may have been reset since; send a frame to each now."""
        found = []
        for descriptor in descriptors:
            count = self._dropped(descriptor)
            if count > self._known.get(descriptor, 0) and descriptor not in self._suspicions:
                self._suspicions[descriptor] = _Suspicion(now, count)
                found.append(descriptor)
        return found

    def gone(self, now: float) -> list[int]:
        """Suspects that were really reset: they answer that frame with nothing but resets."""
        found = []
        for descriptor, suspicion in list(self._suspicions.items()):
            answers = self._answers(descriptor)
            if answers is None or answers.silence < now - suspicion.since + _STEPS_SECONDS:
                # What is dropped from now on is a new suspicion.
                self._known[descriptor] = suspicion.dropped
                del self._suspicions[descriptor]
            elif self._is_reset(now, descriptor, suspicion, answers):
                self.ended(descriptor)
                found.append(descriptor)
        return found

    def _is_reset(self, now: float, descriptor: int, suspicion: _Suspicion, answers: Answers) -> bool:
        # A peer that has not read for long is sent nothing more: then nothing is under way, and it need not answer.
        is_late = answers.is_awaited and now - suspicion.since >= ANSWER_SECONDS + answers.round_trip
        return is_late and self._dropped(descriptor) > suspicion.dropped
