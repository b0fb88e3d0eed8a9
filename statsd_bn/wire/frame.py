"""Frames: where their parts stand, see `statsd_bn.wire`; and headers of msgpack, at a bounded cost.

msgpack makes all objects before anybody can check them, and makes room for as many items as an array announces. So it
is told beforehand how many items there can be; and for a long header, that it holds no array.
"""

import struct
from collections.abc import Callable, Iterable
from itertools import chain
from math import prod
from typing import Any

import msgpack
import numpy as np

from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError, VersionMismatch
from statsd_bn.members import Members
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import RoundKey

PROTOCOL_VERSION = 9
MAGIC = b"SBN"

# Magic and version in one, as nearly all frames begin.
PRELUDE = struct.Struct("<4sI")
BEGINNING = MAGIC + bytes([PROTOCOL_VERSION])

FLOAT = np.dtype("<f8")

# The zero bytes up to a multiple of 8, by their number.
PADDING = tuple(map(bytes, range(8)))

# Where a header begins: in one of fixed fields with the type, else with what msgpack writes first of an array.
TYPE = slice(PRELUDE.size, PRELUDE.size + 1)

_KEY_FIELDS = 7

# The longest key that there is: four names, three integers of 9 bytes, and what says how long each is.
_MOST_KEY_BYTES = 3 * limits.MAX_NAME_BYTES + limits.MAX_PHASE_BYTES + 3 * 9 + 4 * 3 + 1

# A run of members: its first number, and how many follow one another.
RUN = struct.Struct("<HH")

# Every other member, each a run.
_MOST_MEMBERS_BYTES = RUN.size * limits.MAX_MEMBERS // 2

# A request with an array in its header, which only counts are, has fewer bytes than this.
SHORT_BYTES = 2048

# Those of a Register, with its type.
_MOST_FIELDS = 16

# Entries of any map in a report or an error.
MOST_NAMES = 256

# One for all headers, since making one takes as long as packing with it. That in C keeps the interpreter's lock; into
# one in Python, which msgpack has where it was not compiled, two threads would write at a time.
pack: Callable[[Any], bytes] = (
    msgpack.Packer().pack if msgpack.Packer.__module__ == "msgpack._cmsgpack" else msgpack.packb
)


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


def values_in(frame: bytes, end: int, shape: tuple[int, ...]) -> FloatArray:
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


def unpack(name: str, packed: bytes, most_items: int, most_names: int = 0) -> Any:
    """What msgpack holds; no array may have more items, and no map more names, than given.

    Raises:
        ProtocolError: it is not plain msgpack.
    """
    try:
        return msgpack.unpackb(
            packed, max_array_len=most_items, max_map_len=most_names, max_ext_len=0, ext_hook=_refuse_extension
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise _not_msgpack(name, error) from error


def unpack_without_arrays(packed: bytes) -> list[Any]:
    """What a long header of a request holds: only text and bytes, since many small objects would cost much to make.

    Raises:
        ProtocolError: it is not plain msgpack, or there is an array or a map within it.
    """
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(packed), max_array_len=0, max_map_len=0, max_ext_len=0, ext_hook=_refuse_extension
    )
    unpacker.feed(packed)
    try:
        if (number := unpacker.read_array_header()) > _MOST_FIELDS:
            raise ProtocolError(f"header: expected at most {_MOST_FIELDS} fields, got {number}")
        header = [unpacker.unpack() for _ in range(number)]
    except (ValueError, msgpack.UnpackException) as error:
        raise _not_msgpack("header", error) from error
    if unpacker.tell() != len(packed):
        raise ProtocolError(f"header: expected {unpacker.tell()} bytes, got {len(packed)}")
    return header


def array(name: str, value: Any) -> list[Any]:
    """The value, which must be an array.

    Raises:
        ProtocolError: it is something else.
    """
    if type(value) is not list:
        raise ProtocolError(f"{name}: expected an array, got {shown(value)}")
    return value


def packed_key(key: RoundKey) -> bytes:
    """A round key as msgpack."""
    return pack(key)


def unpacked_key(value: Any) -> RoundKey:
    """Round key that a field of a header holds, as msgpack.

    Raises:
        ProtocolError: it is something else.
    """
    fields = unpack("round key", _binary("round key", value, _MOST_KEY_BYTES), _KEY_FIELDS)
    if len(array("round key", fields)) != _KEY_FIELDS:
        raise ProtocolError(f"round key: expected {_KEY_FIELDS} fields, got {len(fields)}")
    return RoundKey(*fields)


def packed_runs(runs: Iterable[tuple[int, int]]) -> bytes:
    """Runs of members, two numbers each."""
    numbers = tuple(chain.from_iterable(runs))
    return struct.pack(f"<{len(numbers)}H", *numbers)


def unpacked_members(value: Any) -> Members:
    """Members that a field of a header holds, as runs.

    Raises:
        ProtocolError: it is something else.
    """
    packed = _binary("members", value, _MOST_MEMBERS_BYTES)
    if len(packed) % RUN.size:
        raise ProtocolError(f"members: expected {RUN.size} bytes for each run, got {len(packed)}")
    return Members(tuple(RUN.iter_unpack(packed)))


def _binary(name: str, value: Any, longest: int) -> bytes:
    if type(value) is not bytes or len(value) > longest:
        raise ProtocolError(f"{name}: expected binary of at most {longest} bytes, got {shown(value)}")
    return value


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ProtocolError(f"expected plain msgpack, got extension type {code}")


def _not_msgpack(name: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"{name}: expected msgpack, got {error or type(error).__name__}")
