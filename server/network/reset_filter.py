"""Reset filter: keeps broken TCP connections from ending the server inside libzmq.

libzmq stops reading a connection while its queue of received messages is full. If the connection breaks then, libzmq
records an I/O error, but keeps the data in the decoder's buffer, and decodes it once the queue has been read. The
decoder answers a ZMTP heartbeat (PING) at once, and that write asserts that there was no I/O error
(`zmq_assert (!_io_error)` in stream_engine_base.cpp). So one PING, buffered behind a full queue when its connection
breaks, ends the process for all jobs. Ordinary ranks never send a PING, but any peer with a key may.

A connection breaks when the peer resets it, or when both directions are shut down. If only one direction is shut down,
libzmq reads its end after the buffered data, which is harmless. So on Linux the server

- attaches to each TCP connection a socket filter that drops segments with the reset flag (`drop_resets`);
- closes a connection by shutting down only its own read direction, or both if its filter cannot be attached
  (`close_connection`);
- detects reset connections itself (`ResetDetector`): a killed process with unread data resets its connections, and
  without the detector only its silence would show that it is lost.

The system counts dropped segments, but a rising count proves nothing, because a reset can be forged. So the server
sends a frame. The system of a living peer acknowledges it, even if the process is frozen; a closed connection answers
with another reset. Unix sockets have no filter: their peers are processes of the same user.
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

_SO_ATTACH_FILTER, _SO_MEMINFO = 26, 55  # Linux socket options that Python's socket module lacks
_MEMINFO = struct.Struct("9I")  # SO_MEMINFO has nine numbers; the last counts dropped segments

# The head of TCP_INFO: unacknowledged segments; ages of the last received data and acknowledgement, in ms; round trip
# in µs.
_TCP_INFO = struct.Struct("=8x 4x4x4x4x I 4x4x4x4x 4x4x I I 4x4x I")

_LENGTH, _FLAGS, _RESET = 12, 13, 0x04  # offsets of a TCP header's length and flags, and the reset flag

# Instructions of the classic Berkeley Packet Filter, which the kernel runs on each segment, as (code, jump if true,
# jump if false, operand).
_DROP, _ACCEPT = (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)
_NO_RESETS = ((0x30, 0, 0, _FLAGS), (0x45, 0, 1, _RESET), _DROP, _ACCEPT)
_HEADERS_ONLY = (
    (0x30, 0, 0, _FLAGS),  # load the byte
    (0x45, 6, 0, _RESET),  # drop if the flag is set
    (0x30, 0, 0, _LENGTH),
    (0x74, 0, 0, 2),  # the byte's upper half is the header's length in words of 4 bytes
    (0x54, 0, 0, 0x3C),
    (0x07, 0, 0, 0),  # store it
    (0x80, 0, 0, 0),  # load the length of the segment
    (0x1D, 1, 0, 0),  # accept a segment without payload
    _DROP,
    _ACCEPT,
)

ANSWER_SECONDS = 0.25  # maximum delay of an acknowledgement beyond the round trip; systems delay it by up to 0.2 s
_CLOCK_STEP_SECONDS = 0.02  # the kernel's clock has steps of 10 ms; an answer may arrive in the same step as the frame


def drop_resets(descriptor: int) -> bool:
    """Drop resets of a TCP connection, or of all later connections to a listening socket; returns whether it worked."""
    try:
        with _borrow(descriptor) as found:
            return _is_tcp(found) and _attach(found, _NO_RESETS)
    except OSError:  # already closed
        return False


def close_connection(descriptor: int) -> None:
    """Close a connection: ZeroMQ reads the buffered data, then the end, and closes the socket."""
    with _borrow(descriptor) as found:
        # Over TCP ZeroMQ would also read data that arrives before it has read the end, unless a filter drops the data.
        may_read = not _is_tcp(found) or _attach(found, _HEADERS_ONLY)
        found.shutdown(socket.SHUT_RD if may_read else socket.SHUT_RDWR)


def dropped_segments(descriptor: int) -> int:
    """Number of dropped segments of a connection, including resets; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    try:
        # Given the family and the type, Python does not query them.
        with _borrow(descriptor, socket.AF_INET, socket.SOCK_STREAM) as found:
            drops: int = _MEMINFO.unpack(found.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))[-1]
    except (OSError, struct.error):  # already closed, or an old kernel
        return 0
    return drops


@dataclass(frozen=True, slots=True)
class TcpState:
    """State of a TCP connection; times in seconds."""

    has_unacknowledged: bool  # whether sent data is unacknowledged
    idle: float  # time since the last data or acknowledgement from the peer
    round_trip: float


def tcp_state(descriptor: int) -> TcpState | None:
    """State of a TCP connection; None if unknown."""
    if sys.platform != "linux":
        return None
    try:
        with _borrow(descriptor) as found:
            info = _TCP_INFO.unpack(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except (OSError, struct.error):  # already closed, or reused for another file
        return None
    unacknowledged, data_milliseconds, acknowledgement_milliseconds, round_trip = info
    silence = min(data_milliseconds, acknowledgement_milliseconds) / 1e3
    return TcpState(unacknowledged > 0, silence, round_trip / 1e6)


@contextmanager
def _borrow(descriptor: int, family: int = -1, kind: int = -1) -> Iterator[socket.socket]:
    """A socket object for a descriptor that ZeroMQ owns; needs no new descriptor, because the limit may be reached."""
    found = socket.socket(family, kind, 0, descriptor)
    try:
        yield found
    finally:
        found.detach()


def _is_tcp(found: socket.socket) -> bool:
    return sys.platform == "linux" and found.family in {socket.AF_INET, socket.AF_INET6}


def _attach(found: socket.socket, program: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Attach a filter for received segments; returns whether the system supports it."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    try:
        found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))
    except OSError as error:
        logger.debug("cannot filter resets: %s", error)
        return False
    return True


class ResetDetector:
    """Detects reset connections by file descriptor."""

    def __init__(
        self, dropped: Callable[[int], int] = dropped_segments, state: Callable[[int], TcpState | None] = tcp_state
    ) -> None:
        self._dropped = dropped
        self._tcp_state = state
        self._known: dict[int, int] = {}  # dropped segments that raise no suspicion
        self._suspects: dict[int, tuple[float, int]] = {}  # time of the probe, and dropped segments until then

    def remove(self, descriptor: int) -> None:
        """Remove a closed connection."""
        self._known.pop(descriptor, None)
        self._suspects.pop(descriptor, None)

    def find_suspects(self, now: float, descriptors: Iterable[int]) -> list[int]:
        """Connections that may have been reset since the last call; the caller must send a probe over each at once."""
        found = []
        for descriptor in descriptors:
            count = self._dropped(descriptor)
            if count > self._known.get(descriptor, 0) and descriptor not in self._suspects:
                self._suspects[descriptor] = now, count
                found.append(descriptor)
        return found

    def confirm_resets(self, now: float) -> list[int]:
        """Suspects that answered the probe with resets only."""
        found = []
        for descriptor, (since, dropped) in list(self._suspects.items()):
            state, waited = self._tcp_state(descriptor), now - since
            if state is None or state.idle < waited + _CLOCK_STEP_SECONDS:
                # Only further drops raise a new suspicion.
                self._known[descriptor] = dropped
                del self._suspects[descriptor]
            # A peer that has stopped reading gets no further data, so no answer is due.
            elif not state.has_unacknowledged or waited < ANSWER_SECONDS + state.round_trip:
                continue
            elif self._dropped(descriptor) > dropped:
                self.remove(descriptor)
                found.append(descriptor)
        return found
