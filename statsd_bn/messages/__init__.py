"""The messages of the protocol, as values that cannot be wrong.

Each message checks itself when it is built, so one that exists is sound, whether the caller built it or
`wire.decode` did. docs/protocol.md describes every field; the order of fields here is their order on the wire.
"""

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
from statsd_bn.messages.kinds import (
    BY_TYPE,
    Message,
    Request,
    values_of,
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
