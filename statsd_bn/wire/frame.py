"""Frames: where their parts stand, see `statsd_bn.wire`."""

import struct
from math import prod
from typing import Any

import numpy as np

from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError, VersionMismatch
from statsd_bn.reduction import FloatArray

PROTOCOL_VERSION = 9
MAGIC = b"SBN"

PRELUDE = struct.Struct("<3sBI")

FLOAT = np.dtype("<f8")

# How msgpack begins an array of 16 fields or more; their number follows in two bytes.
_LONG_ARRAY = b"\xdc"
_FIRST_BYTE = slice(PRELUDE.size, PRELUDE.size + 1)

# Where a session stands: behind the array's beginning, the type, and two bytes for its own length. A Contribution's
# fixed header has it at the same place.
_SHORT_ARRAY_SESSION = slice(PRELUDE.size + 4, PRELUDE.size + 4 + limits.TOKEN_BYTES)
_LONG_ARRAY_SESSION = slice(PRELUDE.size + 6, PRELUDE.size + 6 + limits.TOKEN_BYTES)


def padded(size: int) -> int:
    """Size of so many bytes and the zero bytes behind them, up to a multiple of 8."""
    return size + -size % 8


def header_of(frame: bytes, most: int) -> tuple[bytes, int]:
    """A frame's header, packed, and where it ends; the header may have `most` bytes."""
    if len(frame) > limits.MAX_FRAME_BYTES:
        raise ProtocolError(f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {len(frame)}")
    if len(frame) < PRELUDE.size or not frame.startswith(MAGIC):
        raise ProtocolError(f"frame: expected to begin with {MAGIC!r}, got {bytes(frame[:8])!r}")
    _, version, length = PRELUDE.unpack_from(frame)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"protocol version: expected {PROTOCOL_VERSION}, got {version}; "
            "install the same statsd-bn on the server and on every member",
            expected=PROTOCOL_VERSION,
            got=version,
        )
    end = PRELUDE.size + length
    if length > most or end > len(frame):
        came = len(frame) - PRELUDE.size
        raise ProtocolError(f"header: {length} bytes announced, of which {most} may come, {came} came")
    return frame[PRELUDE.size : end], end


def frame_of(header: bytes, values: FloatArray | bytes | None, most: int) -> bytes:
    """Frame of a header, which may have `most` bytes, and of what follows it.

    Raises:
        ProtocolError: the frame would be too large.
    """
    length = len(header)
    if length > most:
        raise ProtocolError(f"header: expected at most {most} bytes, got {length}")
    prelude = PRELUDE.pack(MAGIC, PROTOCOL_VERSION, length)
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


def values_of(frame: bytes, end: int, shape: tuple[Any, ...]) -> FloatArray:
    """Values of this shape that follow the header, which ends at `end`; a view into the frame.

    Raises:
        ProtocolError: something else follows it.
    """
    for extent in shape:
        if type(extent) is not int or extent < 1:
            raise ProtocolError(f"shape of values: expected positive integers, got {shown(shape)}")
    start = end + -end % 8
    if len(frame) != start + 8 * prod(shape) or any(frame[end:start]):
        got = len(frame) - start
        raise ProtocolError(
            f"values: expected {prod(shape)} float64 for shape {shape} after zero padding, got {got} bytes"
        )
    return np.ndarray(shape, FLOAT, frame, start)


def named_session(frame: bytes) -> bytes:
    """Session that a frame names, found without decoding it; nonsense if it names none, or is unsound.

    The session is the first field of every message that has one.
    """
    return frame[_LONG_ARRAY_SESSION] if frame[_FIRST_BYTE] == _LONG_ARRAY else frame[_SHORT_ARRAY_SESSION]
