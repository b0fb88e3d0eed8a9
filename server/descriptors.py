"""Descriptors: what the server does to the file descriptors of ZeroMQ's connections.

libzmq ends the whole process (`zmq_assert (!_io_error)`) if a connection breaks while more has come over it than its
queue holds, and a heartbeat (PING) of ZMTP is among that. To the system a connection breaks when the peer resets it, or
when both of its directions are shut down; the end of one direction is read in its turn, and does no harm. So resets
are not let through, and the server ends a connection by the direction that it reads from.
"""

import ctypes
import logging
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("statsd_bn.server")

# On Linux; Python's socket has no name for it.
_ATTACH_FILTER = 26

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
    """Keeps resets from a TCP connection, or from all that a listening socket accepts; returns whether it could.

    A peer that has reset its connection is like one whose host has vanished: heartbeats and keepalive notice it.
    """
    try:
        with _borrowed(descriptor) as found:
            return _is_tcp(found) and _attach(found, _NO_RESETS)
    except OSError:  # it has been closed meanwhile
        return False


def hang_up(descriptor: int) -> None:
    """Ends a connection: ZeroMQ reads what has come, then finds the end and closes it."""
    with _borrowed(descriptor) as found:
        # What comes after would be read as well, and so put the end off.
        is_quiet = not _is_tcp(found) or _attach(found, _NOTHING_NEW)
        found.shutdown(socket.SHUT_RD if is_quiet else socket.SHUT_RDWR)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yields the socket behind a descriptor that stays ZeroMQ's; needs none of its own, since there may be no more."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def _is_tcp(found: socket.socket) -> bool:
    return sys.platform == "linux" and found.family in {socket.AF_INET, socket.AF_INET6}


def _attach(found: socket.socket, program: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Has the system run a filter on what comes; returns whether this system can."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    try:
        found.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))
    except OSError as error:
        logger.debug("resets are let through: %s", error)
        return False
    return True
