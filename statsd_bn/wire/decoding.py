"""Decoding: from a frame to its message."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from statsd_bn import limits
from statsd_bn.checks import check_depth, check_integer, check_text, shown
from statsd_bn.errors import ProtocolError
from statsd_bn.messages import (
    BY_TYPE,
    Aggregate,
    Contribution,
    Digest,
    Failure,
    Figures,
    Lateness,
    Message,
    NonFiniteRound,
    Pending,
    Register,
    Registered,
    Request,
    Result,
    RoundTrips,
    Settled,
    Status,
    Whereabouts,
)
from statsd_bn.reduction import FloatArray
from statsd_bn.rows import Rows
from statsd_bn.skew import FIGURES
from statsd_bn.wire.frame import FLOAT, header_of, padded
from statsd_bn.wire.headers import MOST_NAMES, SHORT_BYTES, array, unpack, unpack_without_arrays
from statsd_bn.wire.kept import unpacked_key, unpacked_members
from statsd_bn.wire.repeated import keep_header, repeated_contribution

_REQUESTS = frozenset(get_args(Request))


def decode(frame: bytes) -> Message:
    """Message that `frame` carries; its values are a view into the frame, not a copy.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is not a sound frame.
    """
    packed, end = header_of(frame, limits.MAX_HEADER_BYTES)
    message: Message = _message(unpack("header", packed, limits.MAX_MEMBERS, MOST_NAMES), frame, end)
    return message


def decode_request(frame: bytes) -> Request:
    """Request that `frame` carries; like `decode`, for a server: an unsound frame costs next to nothing.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is not a sound frame of a request.
    """
    if (again := repeated_contribution(frame)) is not None:
        return again
    packed, end = header_of(frame, limits.MAX_REQUEST_HEADER_BYTES)
    is_short = len(packed) <= SHORT_BYTES
    header = unpack("header", packed, limits.MAX_REPLICAS) if is_short else unpack_without_arrays(packed)
    request: Request = _message(header, frame, end)
    if type(request) not in _REQUESTS:
        raise ProtocolError(f"expected a request, got {type(request).__name__}")
    if type(request) is Contribution:
        keep_header(frame, end, request)
    return request


def _message(header: Any, frame: bytes, end: int) -> Any:
    if type(header) is not list or not header:
        raise ProtocolError(f"header: expected [type, ...], got {shown(header)}")
    number = header[0]
    kind = BY_TYPE.get(number) if type(number) is int else None
    if kind is None:
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
    if build := _WITHOUT_VALUES.get(kind):
        return build(fields)
    if len(fields) != len(dataclasses.fields(kind)):
        raise ProtocolError(f"{kind.__name__}: expected {len(dataclasses.fields(kind))} fields, got {len(fields)}")
    return kind(*fields)


def _contribution(fields: list[Any], frame: bytes, end: int) -> Contribution:
    session, key, attempt, counts, vectors, channels = fields
    values = _values(frame, end, (len(array("counts", counts)), vectors, channels))
    return Contribution(session, unpacked_key(key), attempt, Rows(tuple(counts), values))


def _aggregate(fields: list[Any], frame: bytes, end: int) -> Aggregate:
    key, replicas, count, members, non_finite, vectors, channels = fields
    values = _values(frame, end, (vectors, channels))
    among, bearers = unpacked_members(members), unpacked_members(non_finite)
    return Aggregate(unpacked_key(key), replicas, count, among, values, bearers)


def _result(fields: list[Any], frame: bytes, end: int) -> Result:
    session, *aggregate = fields
    return Result(session, _aggregate(aggregate, frame, end))


def _digest(fields: list[Any], frame: bytes, end: int) -> Digest:
    session, step, layers, members = fields
    check_text("layers", layers, limits.MAX_DIGEST_BYTES)
    values = _values(frame, end, (layers.count("\n") + 1, members, FIGURES))
    return Digest(session, step, layers, values)


def _figures(fields: list[Any], frame: bytes, end: int) -> Figures:
    job, group, first, total, layers, members = fields
    check_text("layers", layers, limits.MAX_FIGURES_BYTES, shortest=0)
    check_integer("members", members, 0, limits.MAX_MEMBERS)
    if layers:
        values = _values(frame, end, (layers.count("\n") + 1, members, FIGURES))
    elif len(frame) == padded(end) and not any(frame[end:]):
        values = np.zeros((0, members, FIGURES))
    else:
        raise ProtocolError(f"values: expected none without layers, got {len(frame) - end} bytes")
    return Figures(job, group, first, total, layers, values)


def _pending(fields: list[Any]) -> Pending:
    key, seconds, text, where = fields
    return Pending(unpacked_key(key), seconds, text, where)


def _settled(fields: list[Any]) -> Settled:
    session, key = fields
    return Settled(session, unpacked_key(key))


def _round_trips(fields: list[Any]) -> RoundTrips:
    session, microseconds, counts = fields
    return RoundTrips(session, microseconds, tuple(array("counts", counts)))


def _lateness(fields: list[Any]) -> Lateness:
    session, microseconds, counts = fields
    return Lateness(session, microseconds, tuple(array("counts", counts)))


def _non_finite_round(fields: list[Any]) -> NonFiniteRound:
    session, key, members, what = fields
    return NonFiniteRound(session, unpacked_key(key), unpacked_members(members), what)


def _failure(fields: list[Any]) -> Failure:
    code, text, facts, key = fields
    check_depth("fields", facts)
    return Failure(code, text, facts, None if key is None else unpacked_key(key))


def _status(fields: list[Any]) -> Status:
    (report,) = fields
    check_depth("report", report)
    return Status(report)


def _register(fields: list[Any]) -> Register:
    *plain, known = fields
    return Register(*[*plain, unpacked_members(known)])


def _registered(fields: list[Any]) -> Registered:
    *plain, present = fields
    return Registered(*[*plain, unpacked_members(present)])


def _whereabouts(fields: list[Any]) -> Whereabouts:
    *plain, members, launched, collective = fields
    return Whereabouts(*[*plain, unpacked_members(members), launched, collective])


_WITH_VALUES: dict[type[Message], Callable[[list[Any], bytes, int], Message]] = {
    Contribution: _contribution,
    Aggregate: _aggregate,
    Result: _result,
    Digest: _digest,
    Figures: _figures,
}
_WITHOUT_VALUES: dict[type[Message], Callable[[list[Any]], Message]] = {
    Pending: _pending,
    Settled: _settled,
    RoundTrips: _round_trips,
    Lateness: _lateness,
    NonFiniteRound: _non_finite_round,
    Failure: _failure,
    Status: _status,
    Register: _register,
    Registered: _registered,
    Whereabouts: _whereabouts,
}


def _values(frame: bytes, end: int, shape: tuple[Any, ...]) -> FloatArray:
    size = 1
    for extent in shape:
        if type(extent) is not int or extent < 1:
            raise ProtocolError(f"shape of values: expected positive integers, got {shown(shape)}")
        size *= extent
    start = padded(end)
    if len(frame) != start + 8 * size or any(frame[end:start]):
        got = len(frame) - start
        raise ProtocolError(f"values: expected {size} float64 for shape {shape} after zero padding, got {got} bytes")
    return np.ndarray(shape, FLOAT, frame, start)
