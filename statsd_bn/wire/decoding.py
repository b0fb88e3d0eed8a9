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
    Failure,
    Figures,
    LatenessReport,
    Message,
    NonFiniteRound,
    Pending,
    Register,
    Registered,
    Request,
    Result,
    RoundDone,
    RoundTrips,
    SkewStats,
    StackReport,
    Status,
)
from statsd_bn.skew import FIGURES
from statsd_bn.wire.frame import PRELUDE, TYPE, header_end, padded, values_of
from statsd_bn.wire.headers import (
    MOST_NAMES,
    SHORT_BYTES,
    array,
    unpack,
    unpack_without_arrays,
    unpacked_key,
    unpacked_members,
)
from statsd_bn.wire.round_frames import decode_aggregate, decode_contribution

_REQUESTS = frozenset(get_args(Request))

# How a header of fixed fields begins, and no msgpack array does.
_CONTRIBUTION, _AGGREGATE = bytes([Contribution.type]), bytes([Aggregate.type])
_SHOWN_BYTES = 32


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
    if build := _WITHOUT_VALUES.get(kind):
        return build(fields)
    if len(fields) != len(dataclasses.fields(kind)):
        raise ProtocolError(f"{kind.__name__}: expected {len(dataclasses.fields(kind))} fields, got {len(fields)}")
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
    values = values_of(frame, end, (layers.count("\n") + 1, members, FIGURES))
    return SkewStats(session, step, layers, values)


def _figures(fields: list[Any], frame: bytes, end: int) -> Figures:
    job, group, first, total, layers, members = fields
    check_text("layers", layers, limits.MAX_FIGURES_BYTES, shortest=0)
    check_integer("members", members, 0, limits.MAX_MEMBERS)
    if layers:
        values = values_of(frame, end, (layers.count("\n") + 1, members, FIGURES))
    elif len(frame) == padded(end) and not any(frame[end:]):
        values = np.zeros((0, members, FIGURES))
    else:
        raise ProtocolError(f"values: expected none without layers, got {len(frame) - end} bytes")
    return Figures(job, group, first, total, layers, values)


def _pending(fields: list[Any]) -> Pending:
    key, seconds, text, where = fields
    return Pending(unpacked_key(key), seconds, text, where)


def _round_done(fields: list[Any]) -> RoundDone:
    session, key = fields
    return RoundDone(session, unpacked_key(key))


def _round_trips(fields: list[Any]) -> RoundTrips:
    session, microseconds, counts = fields
    return RoundTrips(session, microseconds, tuple(array("counts", counts)))


def _lateness_report(fields: list[Any]) -> LatenessReport:
    session, microseconds, counts = fields
    return LatenessReport(session, microseconds, tuple(array("counts", counts)))


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


def _stack_report(fields: list[Any]) -> StackReport:
    *plain, members, launched, collective = fields
    return StackReport(*[*plain, unpacked_members(members), launched, collective])


_WITH_VALUES: dict[type[Message], Callable[[list[Any], bytes, int], Message]] = {
    Result: _result,
    SkewStats: _skew_stats,
    Figures: _figures,
}
_WITHOUT_VALUES: dict[type[Message], Callable[[list[Any]], Message]] = {
    Pending: _pending,
    RoundDone: _round_done,
    RoundTrips: _round_trips,
    LatenessReport: _lateness_report,
    NonFiniteRound: _non_finite_round,
    Failure: _failure,
    Status: _status,
    Register: _register,
    Registered: _registered,
    StackReport: _stack_report,
}
