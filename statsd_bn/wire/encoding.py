"""Encoding: from a message to its frame."""

from collections.abc import Callable
from typing import Any, get_args

from statsd_bn import limits
from statsd_bn.messages import (
    Aggregate,
    Contribution,
    Failure,
    Figures,
    Message,
    NonFiniteRound,
    Pending,
    Register,
    Registered,
    Request,
    Result,
    RoundDone,
    SkewStats,
    StackReport,
    values_of,
)
from statsd_bn.reduction import FloatArray
from statsd_bn.wire.frame import frame_of
from statsd_bn.wire.headers import pack, packed_key, packed_runs
from statsd_bn.wire.round_frames import encode_aggregate, encode_contribution

_REQUESTS = frozenset(get_args(Request))

# What a message is on the wire: what follows its header, if anything does, and the fields of the header.
_Flat = tuple[FloatArray | bytes | None, list[Any]]


def encode(message: Message) -> bytes:
    """Frame that carries `message`."""
    kind = type(message)
    if encode_fixed := _FIXED.get(kind):
        return encode_fixed(message)
    most = limits.MAX_REQUEST_HEADER_BYTES if kind in _REQUESTS else limits.MAX_HEADER_BYTES
    values, header = _FLATTEN.get(kind, _flat_fields)(message)
    return frame_of(pack([message.type, *header]), values, most)


def _flat_result(message: Result) -> _Flat:
    return encode(message.aggregate), [message.session]


def _flat_pending(message: Pending) -> _Flat:
    return None, [packed_key(message.key), message.seconds, message.message, message.stacks]


def _flat_round_done(message: RoundDone) -> _Flat:
    return None, [message.session, packed_key(message.key)]


def _flat_non_finite_round(message: NonFiniteRound) -> _Flat:
    return None, [message.session, packed_key(message.key), packed_runs(message.members.runs), message.what]


def _flat_skew_stats(message: SkewStats) -> _Flat:
    return message.values, [message.session, message.step, message.layers, message.values.shape[1]]


def _flat_figures(message: Figures) -> _Flat:
    *plain, values = values_of(message)
    return values, [*plain, values.shape[1]]


def _flat_failure(message: Failure) -> _Flat:
    key = packed_key(message.key) if message.key else None
    return None, [message.code, message.message, message.fields, key]


def _flat_registration(message: Register | Registered) -> _Flat:
    *plain, members = values_of(message)
    return None, [*plain, packed_runs(members.runs)]


def _flat_stack_report(message: StackReport) -> _Flat:
    *plain, members, launched, collective = values_of(message)
    return None, [*plain, packed_runs(members.runs), launched, collective]


def _flat_fields(message: Message) -> _Flat:
    return None, values_of(message)


_FIXED: dict[type[Message], Callable[[Any], bytes]] = {
    Contribution: encode_contribution,
    Aggregate: encode_aggregate,
}
_FLATTEN: dict[type[Message], Callable[[Any], _Flat]] = {
    Result: _flat_result,
    Pending: _flat_pending,
    RoundDone: _flat_round_done,
    NonFiniteRound: _flat_non_finite_round,
    SkewStats: _flat_skew_stats,
    Figures: _flat_figures,
    Failure: _flat_failure,
    Register: _flat_registration,
    Registered: _flat_registration,
    StackReport: _flat_stack_report,
}
