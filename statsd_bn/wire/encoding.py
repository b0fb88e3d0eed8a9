"""Encoding: from a message to its frame."""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.messages import (
    Aggregate,
    Contribution,
    Digest,
    Failure,
    Figures,
    Message,
    NonFiniteRound,
    Pending,
    Register,
    Registered,
    Request,
    Result,
    Settled,
    Whereabouts,
    values_of,
)
from statsd_bn.reduction import FloatArray
from statsd_bn.wire.frame import FLOAT, MAGIC, PRELUDE, PROTOCOL_VERSION
from statsd_bn.wire.headers import pack
from statsd_bn.wire.kept import packed_key, packed_members

_REQUESTS = frozenset(get_args(Request))

# What a message is on the wire: its values, if it has any, and the fields of its header.
_Flat = tuple[FloatArray | None, list[Any]]


def encode(message: Message) -> bytes:
    """Frame that carries `message`."""
    kind = type(message)
    most = limits.MAX_REQUEST_HEADER_BYTES if kind in _REQUESTS else limits.MAX_HEADER_BYTES
    values, header = _FLATTEN.get(kind, _flat_fields)(message)
    packed = pack([message.type, *header])
    length = len(packed)
    if length > most:
        raise ProtocolError(f"header: expected at most {most} bytes, got {length}")
    prelude = PRELUDE.pack(MAGIC, PROTOCOL_VERSION, length)
    if values is None:
        return prelude + packed
    body = np.ascontiguousarray(values, FLOAT)
    frame = b"".join((prelude, packed, bytes(-length % 8), body.data))
    if len(frame) > limits.MAX_FRAME_BYTES:
        raise ProtocolError(
            f"frame: expected at most {limits.MAX_FRAME_BYTES} bytes, got {len(frame)} for values of {values.shape}"
        )
    return frame


def _flat_contribution(message: Contribution) -> _Flat:
    rows = message.rows
    shape = rows.values.shape
    return rows.values, [message.session, packed_key(message.key), message.attempt, rows.counts, shape[1], shape[2]]


def _flat_aggregate(message: Aggregate) -> _Flat:
    total = message.values
    key, members = packed_key(message.key), packed_members(message.members)
    non_finite = packed_members(message.non_finite)
    return total, [key, message.replicas, message.count, members, non_finite, *total.shape]


def _flat_result(message: Result) -> _Flat:
    total, header = _flat_aggregate(message.aggregate)
    return total, [message.session, *header]


def _flat_pending(message: Pending) -> _Flat:
    return None, [packed_key(message.key), message.seconds, message.message, message.whereabouts]


def _flat_settled(message: Settled) -> _Flat:
    return None, [message.session, packed_key(message.key)]


def _flat_non_finite_round(message: NonFiniteRound) -> _Flat:
    return None, [message.session, packed_key(message.key), packed_members(message.members), message.what]


def _flat_digest(message: Digest) -> _Flat:
    return message.values, [message.session, message.step, message.layers, message.values.shape[1]]


def _flat_figures(message: Figures) -> _Flat:
    *plain, values = values_of(message)
    return values, [*plain, values.shape[1]]


def _flat_failure(message: Failure) -> _Flat:
    key = packed_key(message.key) if message.key else None
    return None, [message.code, message.message, message.fields, key]


def _flat_registration(message: Register | Registered) -> _Flat:
    *plain, members = values_of(message)
    return None, [*plain, packed_members(members)]


def _flat_whereabouts(message: Whereabouts) -> _Flat:
    *plain, members, launched, collective = values_of(message)
    return None, [*plain, packed_members(members), launched, collective]


def _flat_fields(message: Message) -> _Flat:
    return None, values_of(message)


_FLATTEN: dict[type[Message], Callable[[Any], _Flat]] = {
    Contribution: _flat_contribution,
    Aggregate: _flat_aggregate,
    Result: _flat_result,
    Pending: _flat_pending,
    Settled: _flat_settled,
    NonFiniteRound: _flat_non_finite_round,
    Digest: _flat_digest,
    Figures: _flat_figures,
    Failure: _flat_failure,
    Register: _flat_registration,
    Registered: _flat_registration,
    Whereabouts: _flat_whereabouts,
}
