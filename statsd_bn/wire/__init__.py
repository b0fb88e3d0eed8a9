"""Message <-> bytes: one frame per message, as docs/protocol.md has it.

    offset  size   content
    0       3      magic, b"SBN"
    3       1      protocol version
    4       4      H, the header's length, unsigned little-endian
    8       H      header: a msgpack array [type, field, field, ...]
    8+H     0-7    zero bytes up to a multiple of 8
    ...     8·n    values: little-endian float64, in C order
    ...     16     seal, of an aggregate or a result

One frame rather than three, because each ZeroMQ frame costs a system call's worth of time; raw numbers
rather than msgpack floats, because they need neither a loop nor a copy to become an array.
"""

import dataclasses
import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import Any, get_args

import msgpack
import numpy as np

from statsd_bn import limits
from statsd_bn.checks import check_depth, shown
from statsd_bn.errors import ProtocolError, VersionMismatch
from statsd_bn.members import Members
from statsd_bn.messages import (
    BY_TYPE,
    Aggregate,
    Contribution,
    Failure,
    Message,
    Pending,
    Register,
    Registered,
    Request,
    Result,
    Status,
    values_of,
)
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire.headers import KEY_FIELDS, MOST_KEY_BYTES, MOST_NAMES, SHORT_BYTES, unpack, unpack_without_arrays

PROTOCOL_VERSION = 2
MAGIC = b"SBN"

_REQUESTS = frozenset(get_args(Request))

_PRELUDE = struct.Struct("<3sBI")

# A run of members: its first number, and how many follow one another.
_RUN = struct.Struct("<HH")

# Every other member, each a run.
_MOST_MEMBERS_BYTES = _RUN.size * limits.MAX_MEMBERS // 2

# A round's key comes with each member's contribution, and its members with each round: what was packed or unpacked
# once is kept. Many layers have rounds at a time.
_KEPT_KEYS, _KEPT_MEMBERS = 4096, 64
_KEPT_MEMBERS_BYTES, _KEPT_RUNS = 1024, 256
_keys: dict[bytes, RoundKey] = {}
_packed: dict[RoundKey, bytes] = {}

# How msgpack begins an array of 16 fields or more, with two bytes for their number.
_LONG_ARRAY = b"\xdc"
_FIRST_BYTE = slice(_PRELUDE.size, _PRELUDE.size + 1)

# Where a session stands: behind the array's beginning, the type, and two bytes for its own length.
_IN_ARRAY = slice(_PRELUDE.size + 4, _PRELUDE.size + 4 + limits.TOKEN_BYTES)
_IN_LONG_ARRAY = slice(_PRELUDE.size + 6, _PRELUDE.size + 6 + limits.TOKEN_BYTES)

_FLOAT = np.dtype("<f8")

# What a message is on the wire: its values, if it has any, and the fields of its header.
_Flat = tuple[FloatArray | None, list[Any]]


def encode(message: Message) -> bytes:
    """Returns the one frame that carries `message`."""
    head, values = _parts(message)
    if isinstance(message, Aggregate | Result):
        seal = message.seal if isinstance(message, Aggregate) else message.aggregate.seal
        return b"".join((head, values, seal))
    return b"".join((head, values))


def unsealed(aggregate: Aggregate) -> tuple[bytes, memoryview | bytes]:
    """Returns the two parts of an aggregate's frame that its seal is made of, and that it stands behind."""
    return _parts(aggregate)


def _parts(message: Message) -> tuple[bytes, memoryview | bytes]:
    """Returns a frame without its seal: all before the values, and the values."""
    values, header = _FLATTEN.get(type(message), _flat_fields)(message)
    packed: bytes = msgpack.packb([message.type, *header])
    most = limits.MAX_REQUEST_HEADER_BYTES if type(message) in _REQUESTS else limits.MAX_HEADER_BYTES
    if len(packed) > most:
        raise ProtocolError(f"header: expected at most {most} bytes, got {len(packed)}")
    prelude = _PRELUDE.pack(MAGIC, PROTOCOL_VERSION, len(packed))
    if values is None:
        return prelude + packed, b""
    body = np.ascontiguousarray(values, dtype=_FLOAT)
    size = _padded(_PRELUDE.size + len(packed)) + body.nbytes
    if size > limits.MAX_FRAME_BYTES:
        raise ProtocolError(
            f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {size} for values of {values.shape}"
        )
    return b"".join((prelude, packed, bytes(-len(packed) % 8))), body.data


def decode(frame: bytes) -> Message:
    """Returns the message that `frame` carries; its values are a view into the frame, not a copy.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is anything else than a sound frame.
    """
    packed, end = _header_of(frame, limits.MAX_HEADER_BYTES)
    message: Message = _message(unpack("header", packed, limits.MAX_MEMBERS, MOST_NAMES), frame, end)
    return message


def decode_request(frame: bytes) -> Request:
    """Returns the request that `frame` carries; as `decode`, for a server: an unsound one costs it next to nothing.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is anything else than a sound frame of a request.
    """
    packed, end = _header_of(frame, limits.MAX_REQUEST_HEADER_BYTES)
    is_short = len(packed) <= SHORT_BYTES
    header = unpack("header", packed, limits.MAX_REPLICAS) if is_short else unpack_without_arrays(packed)
    request: Request = _message(header, frame, end)
    if type(request) not in _REQUESTS:
        raise ProtocolError(f"expected a request, got {type(request).__name__}")
    return request


def _message(header: Any, frame: bytes, end: int) -> Any:
    if type(header) is not list or not header:
        raise ProtocolError(f"header: expected [type, ...], got {shown(header)}")
    if type(header[0]) is not int or header[0] not in BY_TYPE:
        raise ProtocolError(f"type: expected one of {sorted(BY_TYPE)}, got {shown(header[0])}")
    try:
        return _build(BY_TYPE[header[0]], header[1:], frame, end)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"fields of message type {header[0]}: {error}") from error


def named_session(frame: bytes) -> bytes:
    """Returns the session that a frame names, without decoding it; nonsense if it names none, or is unsound.

    It is the first field of every message that has one.
    """
    return frame[_IN_LONG_ARRAY] if frame[_FIRST_BYTE] == _LONG_ARRAY else frame[_IN_ARRAY]


def _padded(size: int) -> int:
    return size + -size % 8


def _header_of(frame: bytes, most: int) -> tuple[bytes, int]:
    """Returns a frame's header, packed, and where it ends."""
    if len(frame) > limits.MAX_FRAME_BYTES:
        raise ProtocolError(f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {len(frame)}")
    if len(frame) < _PRELUDE.size or not frame.startswith(MAGIC):
        raise ProtocolError(f"frame: expected to begin with {MAGIC!r}, got {bytes(frame[:8])!r}")
    _, version, length = _PRELUDE.unpack_from(frame)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"protocol version: expected {PROTOCOL_VERSION}, got {version}; "
            "install the same statsd-bn on the server and on every member",
            expected=PROTOCOL_VERSION,
            got=version,
        )
    end = _PRELUDE.size + length
    if length > most or end > len(frame):
        came = len(frame) - _PRELUDE.size
        raise ProtocolError(f"header: {length} bytes announced, of which {most} may come, {came} came")
    return frame[_PRELUDE.size : end], end


def _flat_contribution(message: Contribution) -> _Flat:
    rows = message.rows
    shape = rows.values.shape
    return rows.values, [message.session, _packed_key(message.key), message.attempt, rows.counts, shape[1], shape[2]]


def _flat_aggregate(message: Aggregate) -> _Flat:
    total = message.values
    key, members = _packed_key(message.key), _packed_members(message.members)
    return total, [key, message.replicas, message.count, members, *total.shape]


def _flat_result(message: Result) -> _Flat:
    total, header = _flat_aggregate(message.aggregate)
    return total, [message.session, *header]


def _flat_pending(message: Pending) -> _Flat:
    return None, [_packed_key(message.key), message.seconds, message.message]


def _flat_failure(message: Failure) -> _Flat:
    key = _packed_key(message.key) if message.key else None
    return None, [message.code, message.message, message.fields, key]


def _flat_registration(message: Register | Registered) -> _Flat:
    *plain, members = values_of(message)
    return None, [*plain, _packed_members(members)]


def _flat_fields(message: Message) -> _Flat:
    return None, values_of(message)


_FLATTEN: dict[type[Message], Callable[[Any], _Flat]] = {
    Contribution: _flat_contribution,
    Aggregate: _flat_aggregate,
    Result: _flat_result,
    Pending: _flat_pending,
    Failure: _flat_failure,
    Register: _flat_registration,
    Registered: _flat_registration,
}


def _packed_key(key: RoundKey) -> bytes:
    packed: bytes | None = _packed.get(key)
    if packed is None:
        packed = _packed[key] = msgpack.packb(key)
        _keep_key(packed, key)  # whoever sends it will receive it
    return packed


def _packed_members(members: Members) -> bytes:
    return _packed_runs(members) if len(members.runs) <= _KEPT_RUNS else _packed_runs.__wrapped__(members)


@lru_cache(maxsize=_KEPT_MEMBERS)
def _packed_runs(members: Members) -> bytes:
    return struct.pack(f"<{2 * len(members.runs)}H", *chain.from_iterable(members.runs))


def _build(kind: type[Message], fields: list[Any], frame: bytes, end: int) -> Message:
    if build_with_values := _WITH_VALUES.get(kind):
        return build_with_values(fields, frame, end)
    if end != len(frame):
        raise ProtocolError(f"frame: expected to end after its header at byte {end}, got {len(frame)}")
    if build := _WITHOUT_VALUES.get(kind):
        return build(fields)
    if len(fields) != len(dataclasses.fields(kind)):
        raise ProtocolError(f"{kind.__name__}: expected {len(dataclasses.fields(kind))} fields, got {len(fields)}")
    return kind(*fields)


def _contribution(fields: list[Any], frame: bytes, end: int) -> Contribution:
    session, key, attempt, counts, vectors, channels = fields
    values = _values(frame, end, (len(_array("counts", counts)), vectors, channels))
    return Contribution(session, _key(key), attempt, Rows(tuple(counts), values))


def _aggregate(fields: list[Any], frame: bytes, end: int) -> Aggregate:
    key, replicas, count, members, vectors, channels = fields
    values, seal = _values(frame, end, (vectors, channels), limits.SEAL_BYTES), frame[-limits.SEAL_BYTES :]
    return Aggregate(_key(key), replicas, count, _members(members), values, seal)


def _result(fields: list[Any], frame: bytes, end: int) -> Result:
    session, *aggregate = fields
    return Result(session, _aggregate(aggregate, frame, end))


def _pending(fields: list[Any]) -> Pending:
    key, seconds, text = fields
    return Pending(_key(key), seconds, text)


def _failure(fields: list[Any]) -> Failure:
    code, text, facts, key = fields
    check_depth("fields", facts)
    return Failure(code, text, facts, None if key is None else _key(key))


def _status(fields: list[Any]) -> Status:
    (report,) = fields
    check_depth("report", report)
    return Status(report)


def _register(fields: list[Any]) -> Register:
    *plain, known = fields
    return Register(*[*plain, _members(known)])


def _registered(fields: list[Any]) -> Registered:
    *plain, present = fields
    return Registered(*[*plain, _members(present)])


_WITH_VALUES: dict[type[Message], Callable[[list[Any], bytes, int], Message]] = {
    Contribution: _contribution,
    Aggregate: _aggregate,
    Result: _result,
}
_WITHOUT_VALUES: dict[type[Message], Callable[[list[Any]], Message]] = {
    Pending: _pending,
    Failure: _failure,
    Status: _status,
    Register: _register,
    Registered: _registered,
}


@lru_cache(maxsize=_KEPT_MEMBERS)
def _members_of(packed: bytes) -> Members:
    if len(packed) % _RUN.size:
        raise ProtocolError(f"members: expected {_RUN.size} bytes for each run, got {len(packed)}")
    return Members(tuple(_RUN.iter_unpack(packed)))


def _array(name: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError(f"{name}: expected an array, got {shown(value)}")
    return value


def _key(value: Any) -> RoundKey:
    packed = _binary("round key", value, MOST_KEY_BYTES)
    return _keys.get(packed) or _keep_key(packed, _unpacked_key(packed))


def _members(value: Any) -> Members:
    packed = _binary("members", value, _MOST_MEMBERS_BYTES)
    # One of thousands of runs takes a megabyte, and is nobody's but a stranger's.
    unpack_members = _members_of if len(packed) <= _KEPT_MEMBERS_BYTES else _members_of.__wrapped__
    return unpack_members(packed)


def _binary(name: str, value: Any, longest: int) -> bytes:
    if type(value) is not bytes or len(value) > longest:
        raise ProtocolError(f"{name}: expected binary of at most {longest} bytes, got {shown(value)}")
    return value


def _keep_key(packed: bytes, key: RoundKey) -> RoundKey:
    if len(_keys) >= _KEPT_KEYS:
        _keys.clear()
        _packed.clear()
    _keys[packed] = key
    return key


def _unpacked_key(packed: bytes) -> RoundKey:
    fields = unpack("round key", packed, KEY_FIELDS)
    if len(_array("round key", fields)) != KEY_FIELDS:
        raise ProtocolError(f"round key: expected {KEY_FIELDS} fields, got {len(fields)}")
    return RoundKey(*fields)


def _values(frame: bytes, end: int, shape: tuple[Any, ...], rest: int = 0) -> FloatArray:
    """Returns the values of this shape, behind which so many bytes follow."""
    size = 1
    for extent in shape:
        if type(extent) is not int or extent < 1:
            raise ProtocolError(f"shape of values: expected positive integers, got {shown(shape)}")
        size *= extent
    start = _padded(end)
    if len(frame) != start + 8 * size + rest or any(frame[end:start]):
        got = len(frame) - start - rest
        raise ProtocolError(f"values: expected {size} float64 for shape {shape} after zero padding, got {got} bytes")
    return np.ndarray(shape, _FLOAT, frame, start)
