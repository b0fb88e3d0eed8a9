"""The messages of the protocol, as values that cannot be wrong.

Each message checks itself when it is built, so one that exists is sound, whether the caller built it or
`wire.decode` did. docs/protocol.md describes every field; the order of fields here is their order on the wire.
"""

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
from statsd_bn.messages.membership import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BUFFERS,
    NO_SERVER,
    WORLD,
    Heartbeat,
    Leave,
    Participation,
    Register,
    Registered,
    StackReport,
    StackRequest,
    missing_members,
)
from statsd_bn.messages.rounds import (
    Aggregate,
    Contribution,
    Failure,
    Pending,
    Result,
    RoundDone,
    sound_aggregate,
    sound_contribution,
)

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "BARRIER",
    "BUFFERS",
    "BY_TYPE",
    "NO_SERVER",
    "WORLD",
    "Aggregate",
    "Contribution",
    "Failure",
    "Figures",
    "FiguresRequest",
    "Heartbeat",
    "LatenessReport",
    "Leave",
    "Message",
    "NonFiniteRound",
    "Participation",
    "Pending",
    "Register",
    "Registered",
    "Request",
    "Result",
    "RoundDone",
    "RoundTrips",
    "SkewStats",
    "StackReport",
    "StackRequest",
    "Status",
    "StatusRequest",
    "missing_members",
    "sound_aggregate",
    "sound_contribution",
    "values_of",
]

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
