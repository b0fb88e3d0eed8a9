"""Descriptors: what the server does to the file descriptors of ZeroMQ's connections.

libzmq ends the whole process (`zmq_assert (!_io_error)`) if a connection breaks while more has come over it than its
queue holds, and a ZMTP heartbeat (PING) is among that. A connection breaks when the peer resets it, or when both of its
directions are shut down. The end of one direction is read in its turn, and does no harm. So the server lets no resets
through, and ends a connection by shutting down the direction that it reads from.
"""

import ctypes
import logging
import socket
import struct
import sys
from collections.abc import Iterator
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


def let_no_reset_through(descriptor: int) -> bool:
    """Keep resets from a TCP connection, or from all that a listening socket accepts; returns whether it could.

    A peer that has reset its connection then looks like one whose host has vanished; `resets` tells them apart.
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
