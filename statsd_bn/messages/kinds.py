"""All kinds of messages: their types, and who may send them."""

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, get_args

from statsd_bn.messages.insight import (
    Figures,
    FiguresRequest,
    LatenessReport,
    NonFiniteRound,
    RoundTrips,
    SkewStats,
    Status,
    StatusRequest,
)
from statsd_bn.messages.membership import Heartbeat, Leave, Register, Registered, StackReport, StackRequest
from statsd_bn.messages.rounds import Aggregate, Contribution, Failure, Pending, Result, RoundDone

# The most frequent first: it is looked for in this order.
Request = (
    Contribution
    | Register
    | Leave
    | StatusRequest
    | Heartbeat
    | Result
    | StackReport
    | RoundDone
    | SkewStats
    | RoundTrips
    | LatenessReport
    | NonFiniteRound
    | FiguresRequest
)
"""What a member says."""

Message = Request | Registered | Aggregate | Failure | Status | Pending | StackRequest | Figures

BY_TYPE: dict[int, type[Message]] = {
    message.type: message for message in sorted(get_args(Message), key=lambda kind: kind.type)
}


def values_of(message: Any) -> list[Any]:
    """Returns a message's field values in wire order."""
    return list(_VALUES_OF[type(message)](message))


def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(kind)]
    # One name would give the bare value.
    return attrgetter(*names) if len(names) > 1 else lambda message: tuple(getattr(message, name) for name in names)


_VALUES_OF = {kind: _getter(kind) for kind in BY_TYPE.values()}
