"""Frames: where their parts stand, see `statsd_bn.wire`."""

import struct
from math import prod

import numpy as np

from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError, VersionMismatch
from statsd_bn.reduction import FloatArray

PROTOCOL_VERSION = 9
MAGIC = b"SBN"

# Magic and version in one, as nearly all frames begin.
PRELUDE = struct.Struct("<4sI")
BEGINNING = MAGIC + bytes([PROTOCOL_VERSION])

FLOAT = np.dtype("<f8")

# The zero bytes up to a multiple of 8, by their number.
PADDING = tuple(map(bytes, range(8)))

# How msgpack begins an array of 16 fields or more; their number follows in two bytes.
_LONG_ARRAY = b"\xdc"

# Where a header begins: in one of fixed fields with the type, else with what msgpack writes first of an array.
TYPE = slice(PRELUDE.size, PRELUDE.size + 1)

# Where a session stands: behind the array's beginning, the type, and two bytes for its own length. A Contribution's
# fixed header has it at the same place.
_SHORT_ARRAY_SESSION = slice(PRELUDE.size + 4, PRELUDE.size + 4 + limits.TOKEN_BYTES)
_LONG_ARRAY_SESSION = slice(PRELUDE.size + 6, PRELUDE.size + 6 + limits.TOKEN_BYTES)


def padded(size: int) -> int:
    """Size of so many bytes and the zero bytes behind them, up to a multiple of 8."""
    return size + -size % 8


def header_end(frame: bytes, most: int) -> int:
    """Where a frame's header ends, which may have `most` bytes.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it has no sound beginning, or the header has not come whole.
    """
    size = len(frame)
    if PRELUDE.size <= size <= limits.MAX_FRAME_BYTES:
        beginning, length = PRELUDE.unpack_from(frame)
        end: int = PRELUDE.size + length
        if beginning == BEGINNING and length <= most and end <= size:
            return end
    raise _unsound(frame, most)


def _unsound(frame: bytes, most: int) -> ProtocolError:
    """Error of a frame whose beginning is not sound."""
    size = len(frame)
    if size > limits.MAX_FRAME_BYTES:
        return ProtocolError(f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {size}")
    if size < PRELUDE.size or not frame.startswith(MAGIC):
        return ProtocolError(f"frame: expected to begin with {MAGIC!r}, got {bytes(frame[:8])!r}")
    if (version := frame[len(MAGIC)]) != PROTOCOL_VERSION:
        return VersionMismatch(
            f"protocol version: expected {PROTOCOL_VERSION}, got {version}; "
            "install the same statsd-bn on the server and on every member",
            expected=PROTOCOL_VERSION,
            got=version,
        )
    _, length = PRELUDE.unpack_from(frame)
    came = size - PRELUDE.size
    return ProtocolError(f"header: {length} bytes announced, of which {most} may come, {came} came")


def frame_of(header: bytes, values: FloatArray | bytes | None, most: int) -> bytes:
    """Frame of a header, which may have `most` bytes, and of what follows it.

    Raises:
        ProtocolError: the frame would be too large.
    """
    length = len(header)
    if length > most:
        raise ProtocolError(f"header: expected at most {most} bytes, got {length}")
    prelude = PRELUDE.pack(BEGINNING, length)
    if values is None:
        return prelude + header
    body = values if isinstance(values, bytes) else np.ascontiguousarray(values, FLOAT).data
    frame = b"".join((prelude, header, bytes(-length % 8), body))
    if len(frame) > limits.MAX_FRAME_BYTES:
        shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
        raise ProtocolError(
            f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {len(frame)} for values of {shape}"
        )
    return frame


def values_of(frame: bytes, end: int, shape: tuple[int, ...]) -> FloatArray:
    """Values of this shape that follow the header, which ends at `end`; a view into the frame.

    Raises:
        ProtocolError: something else follows it.
    """
    start, size = (end + 7) & -8, 8 * prod(shape)
    # No extent of a shape from the wire is negative.
    if size and len(frame) == start + size and frame[end:start] == PADDING[start - end]:
        return np.ndarray(shape, FLOAT, frame, start)
    if not size:
        raise ProtocolError(f"shape of values: expected positive integers, got {shown(shape)}")
    got = len(frame) - start
    raise ProtocolError(f"values: expected {size // 8} float64 for shape {shape} after zero padding, got {got} bytes")


def named_session(frame: bytes) -> bytes:
    """Session that a frame names, found without decoding it; nonsense if it names none, or is unsound.

    The session is the first field of every message that has one.
    """
    return frame[_LONG_ARRAY_SESSION] if frame[TYPE] == _LONG_ARRAY else frame[_SHORT_ARRAY_SESSION]
