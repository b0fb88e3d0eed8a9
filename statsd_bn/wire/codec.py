"""From a message to its frame, and back."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from statsd_bn import limits
from statsd_bn.checks import check_depth, check_integer, check_text, shown
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members
from statsd_bn.messages import (
    BY_TYPE,
    Aggregate,
    Contribution,
    Figures,
    Message,
    Request,
    Result,
    SkewStats,
    values_of,
)
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import FIGURES
from statsd_bn.wire.frame import (
    MOST_NAMES,
    PRELUDE,
    SHORT_BYTES,
    TYPE,
    array,
    frame_of,
    header_end,
    pack,
    packed_key,
    packed_runs,
    padded,
    unpack,
    unpack_without_arrays,
    unpacked_key,
    unpacked_members,
    values_in,
)
from statsd_bn.wire.round_frames import (
    decode_aggregate,
    decode_contribution,
    encode_aggregate,
    encode_contribution,
)

_REQUESTS = frozenset(get_args(Request))

# How a header of fixed fields begins, and no msgpack array does.
_CONTRIBUTION, _AGGREGATE = bytes([Contribution.type]), bytes([Aggregate.type])
_SHOWN_BYTES = 32

Write = Callable[[Any], Any]
Read = Callable[[str, Any], Any]


def encode(message: Message) -> bytes:
    """Frame that carries `message`."""
    if isinstance(message, Contribution):
        return encode_contribution(message)
    if isinstance(message, Aggregate):
        return encode_aggregate(message)
    kind = type(message)
    values, fields = _VALUES[kind](message) if kind in _VALUES else (None, values_of(message))
    for place, _, write, _ in _CONVERTED[kind]:
        fields[place] = write(fields[place])
    most = limits.MAX_REQUEST_HEADER_BYTES if kind in _REQUESTS else limits.MAX_HEADER_BYTES
    return frame_of(pack([message.type, *fields]), values, most)


def decode(frame: bytes) -> Message:
    """Message that `frame` carries; its values are a view into the frame, not a copy.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is not a sound frame.
    """
    kind = frame[TYPE]
    if kind == _AGGREGATE:
        return decode_aggregate(frame, limits.MAX_HEADER_BYTES)
    if kind == _CONTRIBUTION:
        return decode_contribution(frame, limits.MAX_HEADER_BYTES)
    end = header_end(frame, limits.MAX_HEADER_BYTES)
    header = unpack("header", frame[PRELUDE.size : end], limits.MAX_MEMBERS, MOST_NAMES)
    message: Message = _message(header, frame, end)
    return message


def decode_request(frame: bytes) -> Request:
    """Request that `frame` carries; like `decode`, for a server: an unsound frame costs next to nothing.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is not a sound frame of a request.
    """
    kind = frame[TYPE]
    if kind == _CONTRIBUTION:
        return decode_contribution(frame, limits.MAX_REQUEST_HEADER_BYTES)
    end = header_end(frame, limits.MAX_REQUEST_HEADER_BYTES)
    if kind == _AGGREGATE:
        raise ProtocolError("expected a request, got Aggregate")
    packed = frame[PRELUDE.size : end]
    is_short = len(packed) <= SHORT_BYTES
    header = unpack("header", packed, limits.MAX_REPLICAS) if is_short else unpack_without_arrays(packed)
    request: Request = _message(header, frame, end)
    if type(request) not in _REQUESTS:
        raise ProtocolError(f"expected a request, got {type(request).__name__}")
    return request


def _message(header: Any, frame: bytes, end: int) -> Any:
    if type(header) is not list or not header:
        raise ProtocolError(f"header: expected [type, ...], got {shown(header)}")
    number = header[0]
    kind = BY_TYPE.get(number) if type(number) is int else None
    if kind is None or kind in (Contribution, Aggregate):
        raise ProtocolError(f"type: expected one of {sorted(BY_TYPE)}, got {shown(number)}")
    try:
        return _build(kind, header[1:], frame, end)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"fields of message type {number}: {error}") from error


def _build(kind: type[Message], fields: list[Any], frame: bytes, end: int) -> Message:
    if build_with_values := _WITH_VALUES.get(kind):
        return build_with_values(fields, frame, end)
    if end != len(frame):
        raise ProtocolError(f"frame: expected to end after its header at byte {end}, got {len(frame)}")
    if len(fields) != len(dataclasses.fields(kind)):
        raise ProtocolError(f"{kind.__name__}: expected {len(dataclasses.fields(kind))} fields, got {len(fields)}")
    for place, name, _, read in _CONVERTED[kind]:
        fields[place] = read(name, fields[place])
    return kind(*fields)


def _result(fields: list[Any], frame: bytes, end: int) -> Result:
    (session,) = fields
    start = padded(end)
    if any(frame[end:start]):
        raise ProtocolError("result: expected zero bytes up to the aggregate's frame")
    aggregate = frame[start:]
    if aggregate[TYPE] != _AGGREGATE:
        raise ProtocolError(f"result: expected the frame of an aggregate, got {shown(aggregate[:_SHOWN_BYTES])}")
    return Result(session, decode_aggregate(aggregate, limits.MAX_HEADER_BYTES))


def _skew_stats(fields: list[Any], frame: bytes, end: int) -> SkewStats:
    session, step, layers, members = fields
    check_text("layers", layers, limits.MAX_SKEW_BYTES)
    check_integer("members", members, 1, limits.MAX_MEMBERS)
    values = values_in(frame, end, (layers.count("\n") + 1, members, FIGURES))
    return SkewStats(session, step, layers, values)


def _figures(fields: list[Any], frame: bytes, end: int) -> Figures:
    job, group, first, total, layers, members = fields
    check_text("layers", layers, limits.MAX_FIGURES_BYTES, shortest=0)
    check_integer("members", members, 0, limits.MAX_MEMBERS)
    if layers:
        values = values_in(frame, end, (layers.count("\n") + 1, members, FIGURES))
    elif len(frame) == padded(end) and not any(frame[end:]):
        values = np.zeros((0, members, FIGURES))
    else:
        raise ProtocolError(f"values: expected none without layers, got {len(frame) - end} bytes")
    return Figures(job, group, first, total, layers, values)


def _with_depth(name: str, value: Any) -> Any:
    check_depth(name, value)
    return value


# What follows the header of a message, and the header's fields.
_VALUES: dict[type[Message], Callable[[Any], tuple[FloatArray | bytes, list[Any]]]] = {
    Result: lambda message: (encode(message.aggregate), [message.session]),
    SkewStats: lambda message: (
        message.values,
        [message.session, message.step, message.layers, message.values.shape[1]],
    ),
    Figures: lambda message: (message.values, [*values_of(message)[:-1], message.values.shape[1]]),
}
_WITH_VALUES: dict[type[Message], Callable[[list[Any], bytes, int], Message]] = {
    Result: _result,
    SkewStats: _skew_stats,
    Figures: _figures,
}

# How a field of a type is written and read; any other is as msgpack has it.
_TYPES: dict[Any, tuple[Write, Read]] = {
    RoundKey: (packed_key, lambda _, value: unpacked_key(value)),
    RoundKey | None: (
        lambda key: None if key is None else packed_key(key),
        lambda _, value: None if value is None else unpacked_key(value),
    ),
    Members: (lambda members: packed_runs(members.runs), lambda _, value: unpacked_members(value)),
    tuple[int, ...]: (list, lambda name, value: tuple(array(name, value))),
    dict[str, Any]: (dict, _with_depth),
}
_CONVERTED: dict[type[Message], list[tuple[int, str, Write, Read]]] = {
    kind: [
        (place, field.name, *_TYPES[field.type])
        for place, field in enumerate(dataclasses.fields(kind))
        if field.type in _TYPES
    ]
    for kind in BY_TYPE.values()
}
