"""Message <-> bytes: one frame per message, as docs/protocol.md specifies it.

Prelude, header and values share a frame, because each ZeroMQ frame costs about a system call. Values are raw numbers
instead of msgpack floats: they become an array without a loop or a copy. In each round over the server a member sends a
Contribution and receives an Aggregate, so these two have headers of fixed fields, which one `struct` call reads.

msgpack creates every object before it can be checked, and allocates as many items as an array announces. So the number
of items is bounded in advance.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterable
from itertools import chain
from math import prod
from typing import Any, get_args

import msgpack
import numpy as np

from statsd_bn import limits
from statsd_bn.checks import check_depth, check_integer, check_text, short_repr
from statsd_bn.errors import ProtocolError, StatsdBNError, VersionMismatch
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import BY_TYPE, Aggregate, Contribution, Failure, Figures, Message, Request, Result, SkewStats
from statsd_bn.reduction import FloatArray, Rows
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import FIGURES
from statsd_bn.text import wire_text

PROTOCOL_VERSION = 9
MAGIC = b"SBN"

_PRELUDE = struct.Struct("<4sI")
_MAGIC_AND_VERSION = MAGIC + bytes([PROTOCOL_VERSION])

_FLOAT = np.dtype("<f8")
_PADDING = tuple(map(bytes, range(8)))  # zero bytes up to a multiple of 8, by their number

# The header's first byte: the type in a header of fixed fields, else the start of a msgpack array.
_TYPE = slice(_PRELUDE.size, _PRELUDE.size + 1)
_CONTRIBUTION_TYPE, _AGGREGATE_TYPE = bytes([Contribution.type]), bytes([Aggregate.type])

_CONTRIBUTION_HEADER = struct.Struct("<BBH8sIQQQQ")
_AGGREGATE_HEADER = struct.Struct("<BBHIIIQQQQ")

# Prelude and header in one struct; a contribution's first count too, since most members have one replica.
_CONTRIBUTION_FRAME = struct.Struct(f"{_PRELUDE.format}{_CONTRIBUTION_HEADER.format[1:]}Q")
_AGGREGATE_FRAME = struct.Struct(f"{_PRELUDE.format}{_AGGREGATE_HEADER.format[1:]}")
_COUNT_BYTES = _VALUE_BYTES = 8
_COUNTS = _CONTRIBUTION_FRAME.size - _COUNT_BYTES

# The longest key in msgpack: four texts with 3 bytes before each, three integers of 9 bytes, and the array's byte.
_KEY_FIELDS = 7
_MAX_KEY_BYTES = 3 * limits.MAX_NAME_BYTES + limits.MAX_PHASE_BYTES + 3 * 9 + 4 * 3 + 1

# A run of members: its first number and its length. The set with the most runs has every second member.
_RUN = struct.Struct("<HH")
_MAX_MEMBERS_BYTES = _RUN.size * limits.MAX_MEMBERS // 2

_SHORT_HEADER_BYTES = 2048  # a request with a longer header must not have arrays

_MAX_MAP_ENTRIES = 256  # in a report or an error

_rows, _contribution, _aggregate = Rows.unchecked, Contribution.unchecked, Aggregate.unchecked

_REQUESTS = frozenset(get_args(Request))
_MAX_FIELDS = 1 + max(len(dataclasses.fields(kind)) for kind in _REQUESTS)  # of a request, with its type


def encode(message: Message) -> bytes:
    """Returns the frame of `message`; raises ProtocolError if it would be too large."""
    if isinstance(message, Contribution):
        return _encode_contribution(message)
    if isinstance(message, Aggregate):
        return _encode_aggregate(message)
    kind = type(message)
    fields: list[Any] = [getattr(message, field.name) for field in dataclasses.fields(message)]
    for place, _, write, _ in _CONVERTED[kind]:
        fields[place] = write(fields[place])
    body = None
    if kind is Result:
        body = _encode_aggregate(fields.pop())
    elif kind is SkewStats or kind is Figures:
        body, fields[-1] = fields[-1], fields[-1].shape[1]
    max_header = limits.MAX_REQUEST_HEADER_BYTES if kind in _REQUESTS else limits.MAX_HEADER_BYTES
    return _make_frame(msgpack.packb([message.type, *fields]), body, max_header)


def encode_failure(error: StatsdBNError, key: RoundKey | None = None) -> bytes:
    """Returns the frame of the Failure that reports `error`; `key` is that of the failed round, if any."""
    # Cached errors are raised repeatedly; each raise would extend the traceback, which keeps received frames alive.
    error.__traceback__ = None
    return encode(Failure(error.code, wire_text(error.message), error.fields, key))


def decode_request(frame: bytes) -> Request:
    """Returns the request in `frame`, like `decode`, with tighter limits, so that malformed frames cost little."""
    request: Any = decode(frame, limits.MAX_REQUEST_HEADER_BYTES)
    if type(request) not in _REQUESTS:
        raise ProtocolError(f"expected a request, got {type(request).__name__}")
    return request  # type: ignore[no-any-return]


def decode(frame: bytes, max_header: int = limits.MAX_HEADER_BYTES) -> Message:
    """Returns the message in `frame`; its values are a view into the frame, not a copy.

    Raises VersionMismatch or ProtocolError for a frame that breaks docs/protocol.md.
    """
    start = frame[_TYPE]
    if start == _CONTRIBUTION_TYPE:
        return _decode_contribution(frame, max_header)
    if start == _AGGREGATE_TYPE:
        return _decode_aggregate(frame, max_header)
    end = _header_end(frame, max_header)
    packed = frame[_PRELUDE.size : end]
    if max_header != limits.MAX_REQUEST_HEADER_BYTES:
        header = _unpack("header", packed, limits.MAX_MEMBERS, _MAX_MAP_ENTRIES)
    elif len(packed) > _SHORT_HEADER_BYTES:
        header = _unpack_without_arrays(packed)
    else:
        header = _unpack("header", packed, limits.MAX_REPLICAS)
    if type(header) is not list or not header:
        raise ProtocolError(f"header: expected [type, ...], got {short_repr(header)}")
    number, *fields = header
    kind = BY_TYPE.get(number) if type(number) is int else None
    if kind is None or kind in (Contribution, Aggregate):
        raise ProtocolError(f"type: expected one of {sorted(BY_TYPE)}, got {short_repr(number)}")
    try:
        return _build(kind, fields, frame, end)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"fields of message type {number}: {error}") from error


def _encode_contribution(message: Contribution) -> bytes:
    job, group, epoch, step, layer, call, phase = message.key
    counts, values = message.rows.counts, message.rows.values
    replicas, vectors, channels = values.shape
    fixed = _CONTRIBUTION_HEADER.pack(
        Contribution.type, vectors, replicas, message.session, channels, epoch, step, call, message.attempt
    )
    texts = f"{job}\0{group}\0{layer}\0{phase}".encode()
    header = b"".join((fixed, struct.pack(f"<{replicas}Q", *counts), texts))
    return _make_frame(header, values, limits.MAX_REQUEST_HEADER_BYTES)


def _encode_aggregate(message: Aggregate) -> bytes:
    job, group, epoch, step, layer, call, phase = message.key
    members, whose, values = message.members.runs, message.non_finite.runs, message.values
    vectors, channels = values.shape
    fixed = _AGGREGATE_HEADER.pack(
        Aggregate.type, vectors, len(members), len(whose), channels, message.replicas, message.count, epoch, step, call
    )
    texts = f"{job}\0{group}\0{layer}\0{phase}".encode()
    header = b"".join((fixed, _pack_runs(members + whose), texts))
    return _make_frame(header, values, limits.MAX_HEADER_BYTES)


def _decode_contribution(frame: bytes, max_header: int) -> Contribution:
    size = len(frame)
    if size < _CONTRIBUTION_FRAME.size:
        raise _truncated(frame, max_header, _CONTRIBUTION_FRAME.size)
    beginning, length, _, vectors, replicas, session, channels, epoch, step, call, attempt, count = (
        _CONTRIBUTION_FRAME.unpack_from(frame)
    )
    end = _PRELUDE.size + length
    start = (end + 7) & -8
    texts = _COUNTS + _COUNT_BYTES * replicas
    if not (
        beginning == _MAGIC_AND_VERSION and length <= max_header and texts <= end <= size <= limits.MAX_FRAME_BYTES
    ):
        raise _truncated(frame, max_header, texts)
    counts = (count,) if replicas == 1 else struct.unpack_from(f"<{replicas}Q", frame, _COUNTS)
    key = _read_key(frame[texts:end], epoch, step, call)
    shape = (replicas, vectors, channels)
    if (
        size == start + _VALUE_BYTES * replicas * vectors * channels
        and frame[end:start] == _PADDING[start - end]
        and 0 < replicas <= limits.MAX_REPLICAS
        and 0 < vectors <= limits.MAX_VECTORS
        and 0 < channels <= limits.MAX_CHANNELS
        and attempt <= limits.MAX_COUNTER
        and max(counts) <= limits.MAX_COUNT
    ):
        rows = _rows(counts, np.ndarray(shape, _FLOAT, frame, start))
        return _contribution(session, key, attempt, rows)
    # Raises the error of the check that failed.
    return Contribution(session, key, attempt, Rows(counts, _values_in(frame, end, shape)))


def _decode_aggregate(frame: bytes, max_header: int) -> Aggregate:
    size = len(frame)
    if size < _AGGREGATE_FRAME.size:
        raise _truncated(frame, max_header, _AGGREGATE_FRAME.size)
    beginning, length, _, vectors, member_runs, non_finite_runs, channels, replicas, count, epoch, step, call = (
        _AGGREGATE_FRAME.unpack_from(frame)
    )
    end = _PRELUDE.size + length
    second = _AGGREGATE_FRAME.size + _RUN.size * member_runs
    texts = second + _RUN.size * non_finite_runs
    if not (
        beginning == _MAGIC_AND_VERSION and length <= max_header and texts <= end <= size <= limits.MAX_FRAME_BYTES
    ):
        raise _truncated(frame, max_header, texts)
    key = _read_key(frame[texts:end], epoch, step, call)
    values = _values_in(frame, end, (vectors, channels))
    members = Members(
        (_RUN.unpack_from(frame, _AGGREGATE_FRAME.size),)
        if member_runs == 1  # the usual case: no member is missing
        else tuple(_RUN.iter_unpack(frame[_AGGREGATE_FRAME.size : second]))
    )
    non_finite = Members(tuple(_RUN.iter_unpack(frame[second:texts]))) if non_finite_runs else NO_MEMBERS
    if (
        0 < replicas <= limits.MAX_REPLICAS * limits.MAX_MEMBERS
        and vectors <= limits.MAX_VECTORS
        and channels <= limits.MAX_CHANNELS
        and count <= limits.MAX_COUNT
    ):
        return _aggregate(key, replicas, count, members, values, non_finite)
    return Aggregate(key, replicas, count, members, values, non_finite)  # raises the error of the check that failed


def _read_key(packed: bytes, epoch: int, step: int, call: int) -> RoundKey:
    """Returns the key of a frame: `packed` has job, group, layer and phase in UTF-8, with a zero byte between two."""
    try:
        texts = packed.decode()
        job, group, layer, phase = texts.split("\0")
    except ValueError as error:
        raise ProtocolError(
            f"round key: expected job, group, layer and phase in UTF-8, got {short_repr(packed)}"
        ) from error
    # The fast path for nearly all keys: each frame of a round has one. The largest counter has all bits set.
    if (
        len(packed) <= limits.MAX_NAME_BYTES
        and len(phase) <= limits.MAX_PHASE_BYTES
        and texts.isascii()
        and "" not in (job, group, layer, phase)
        and texts.replace("\0", "").isprintable()
        and epoch | step | call <= limits.MAX_COUNTER
    ):
        return tuple.__new__(RoundKey, (job, group, epoch, step, layer, call, phase))
    return RoundKey(job, group, epoch, step, layer, call, phase)


def _truncated(frame: bytes, max_header: int, least: int) -> ProtocolError:
    """Returns the error of a header that is cut, or shorter than its numbers demand (`least` bytes)."""
    end = _header_end(frame, max_header)
    return ProtocolError(f"header: expected at least {least - _PRELUDE.size} bytes, got {end - _PRELUDE.size}")


def _build(kind: type[Message], fields: list[Any], frame: bytes, end: int) -> Message:
    if kind is Result:
        return _build_result(fields, frame, end)
    if kind is SkewStats or kind is Figures:
        return _build_figures(kind, fields, frame, end)
    if end != len(frame):
        raise ProtocolError(f"frame: expected to end after its header at byte {end}, got {len(frame)}")
    if len(fields) != len(dataclasses.fields(kind)):
        raise ProtocolError(f"{kind.__name__}: expected {len(dataclasses.fields(kind))} fields, got {len(fields)}")
    for place, name, _, read in _CONVERTED[kind]:
        fields[place] = read(name, fields[place])
    return kind(*fields)


def _build_result(fields: list[Any], frame: bytes, end: int) -> Message:
    (session,) = fields
    start = (end + 7) & -8
    if any(frame[end:start]):
        raise ProtocolError("result: expected zero bytes up to the aggregate's frame")
    aggregate = frame[start:]
    if aggregate[_TYPE] != _AGGREGATE_TYPE:
        raise ProtocolError(f"result: expected the frame of an aggregate, got {short_repr(aggregate[:32])}")
    return Result(session, _decode_aggregate(aggregate, limits.MAX_HEADER_BYTES))


def _build_figures(kind: Any, fields: list[Any], frame: bytes, end: int) -> Message:
    *others, layers, members = fields
    least, longest = (1, limits.MAX_SKEW_BYTES) if kind is SkewStats else (0, limits.MAX_FIGURES_BYTES)
    check_text("layers", layers, longest, shortest=least)
    check_integer("members", members, least, limits.MAX_MEMBERS)
    if layers:
        values = _values_in(frame, end, (layers.count("\n") + 1, members, FIGURES))
    elif len(frame) == (end + 7) & -8 and not any(frame[end:]):
        values = np.zeros((0, members, FIGURES))
    else:
        raise ProtocolError(f"values: expected none without layers, got {len(frame) - end} bytes")
    message: Message = kind(*others, layers, values)
    return message


def _make_frame(header: bytes, values: FloatArray | bytes | None, max_header: int) -> bytes:
    length = len(header)
    if length > max_header:
        raise ProtocolError(f"header: expected at most {max_header} bytes, got {length}")
    prelude = _PRELUDE.pack(_MAGIC_AND_VERSION, length)
    if values is None:
        return prelude + header
    body = values if isinstance(values, bytes) else np.ascontiguousarray(values, _FLOAT).data
    frame = b"".join((prelude, header, bytes(-length % 8), body))
    if len(frame) > limits.MAX_FRAME_BYTES:
        shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
        raise ProtocolError(
            f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {len(frame)} for values of {shape}"
        )
    return frame


def _header_end(frame: bytes, max_header: int) -> int:
    """Returns the offset at which a frame's header ends; raises the error of a malformed prelude."""
    size = len(frame)
    if size > limits.MAX_FRAME_BYTES:
        raise ProtocolError(f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {size}")
    if size < _PRELUDE.size or not frame.startswith(MAGIC):
        raise ProtocolError(f"frame: expected to begin with {MAGIC!r}, got {bytes(frame[:8])!r}")
    if (version := frame[len(MAGIC)]) != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"protocol version: expected {PROTOCOL_VERSION}, got {version}; "
            "install the same statsd-bn on the server and on every member",
            expected=PROTOCOL_VERSION,
            got=version,
        )
    _, length = _PRELUDE.unpack_from(frame)
    available = size - _PRELUDE.size
    if length > min(max_header, available):
        raise ProtocolError(f"header: {length} bytes announced, at most {max_header} allowed, {available} received")
    end: int = _PRELUDE.size + length
    return end


def _values_in(frame: bytes, end: int, shape: tuple[int, ...]) -> FloatArray:
    """Returns the values of this shape behind the header, which ends at `end`, as a view into the frame."""
    start, size = (end + 7) & -8, 8 * prod(shape)
    # The numbers of a shape are unsigned on the wire, so all are positive if `size` is positive.
    if size and len(frame) == start + size and frame[end:start] == _PADDING[start - end]:
        return np.ndarray(shape, _FLOAT, frame, start)
    if not size:
        raise ProtocolError(f"shape of values: expected positive integers, got {short_repr(shape)}")
    got = len(frame) - start
    raise ProtocolError(f"values: expected {size // 8} float64 for shape {shape} after zero padding, got {got} bytes")


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ProtocolError(f"expected plain msgpack, got extension type {code}")


_PLAIN: dict[str, Any] = {"max_ext_len": 0, "ext_hook": _refuse_extension}


def _unpack(name: str, packed: bytes, max_items: int, max_entries: int = 0) -> Any:
    """Returns the content of plain msgpack, with at most `max_items` in an array and `max_entries` in a map."""
    try:
        return msgpack.unpackb(packed, max_array_len=max_items, max_map_len=max_entries, **_PLAIN)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{name}: expected msgpack, got {error or type(error).__name__}") from error


def _unpack_without_arrays(packed: bytes) -> list[Any]:
    """Returns a request's long header, which must not have arrays or maps: many small objects cost too much."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(packed), max_array_len=0, max_map_len=0, **_PLAIN)
    unpacker.feed(packed)
    try:
        if (number := unpacker.read_array_header()) > _MAX_FIELDS:
            raise ProtocolError(f"header: expected at most {_MAX_FIELDS} fields, got {number}")
        header = [unpacker.unpack() for _ in range(number)]
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"header: expected msgpack, got {error or type(error).__name__}") from error
    if unpacker.tell() != len(packed):
        raise ProtocolError(f"header: expected {unpacker.tell()} bytes, got {len(packed)}")
    return header


def _array(name: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError(f"{name}: expected an array, got {short_repr(value)}")
    return value


def _binary(name: str, value: Any, longest: int) -> bytes:
    if type(value) is not bytes or len(value) > longest:
        raise ProtocolError(f"{name}: expected binary of at most {longest} bytes, got {short_repr(value)}")
    return value


def _unpack_key(_name: str, value: Any) -> RoundKey:
    fields = _unpack("round key", _binary("round key", value, _MAX_KEY_BYTES), _KEY_FIELDS)
    if len(_array("round key", fields)) != _KEY_FIELDS:
        raise ProtocolError(f"round key: expected {_KEY_FIELDS} fields, got {len(fields)}")
    return RoundKey(*fields)


def _pack_runs(runs: Iterable[tuple[int, int]]) -> bytes:
    numbers = tuple(chain.from_iterable(runs))
    return struct.pack(f"<{len(numbers)}H", *numbers)


def _unpack_members(_name: str, value: Any) -> Members:
    packed = _binary("members", value, _MAX_MEMBERS_BYTES)
    if len(packed) % _RUN.size:
        raise ProtocolError(f"members: expected {_RUN.size} bytes for each run, got {len(packed)}")
    return Members(tuple(_RUN.iter_unpack(packed)))


# How to write and read a field, by its type; msgpack converts all others.
_Write = Callable[[Any], Any]
_Read = Callable[[str, Any], Any]
_CONVERTERS: dict[Any, tuple[_Write, _Read]] = {
    RoundKey: (msgpack.packb, _unpack_key),
    RoundKey | None: (
        lambda key: None if key is None else msgpack.packb(key),
        lambda name, value: None if value is None else _unpack_key(name, value),
    ),
    Members: (lambda members: _pack_runs(members.runs), _unpack_members),
    tuple[int, ...]: (list, lambda name, value: tuple(_array(name, value))),
    dict[str, Any]: (dict, check_depth),
}
_CONVERTED: dict[type[Message], list[tuple[int, str, _Write, _Read]]] = {
    kind: [
        (place, field.name, *_CONVERTERS[field.type])
        for place, field in enumerate(dataclasses.fields(kind))
        if field.type in _CONVERTERS
    ]
    for kind in BY_TYPE.values()
}
