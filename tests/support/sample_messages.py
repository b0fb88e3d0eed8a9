"""One sound message of each type."""

import numpy as np

from statsd_bn.members import Members
from statsd_bn.messages import (
    Aggregate,
    Contribution,
    Failure,
    Figures,
    FiguresRequest,
    Heartbeat,
    LatenessReport,
    Leave,
    Message,
    NonFiniteRound,
    Pending,
    Registered,
    Result,
    RoundDone,
    RoundTrips,
    SkewStats,
    StackReport,
    StackRequest,
    Status,
    StatusRequest,
)
from statsd_bn.rows import Rows
from support.strategies import KEY, register

AGGREGATE = Aggregate(KEY, 1, 1, Members.of([0]), np.ones((2, 3)))

SAMPLES: dict[type[Message], Message] = {
    type(message): message
    for message in (
        register(),
        Registered(b"session0", b"server00", 1, 2, 4, Members.of([3, 300])),
        Contribution(b"session0", KEY, 0, Rows((1,), np.ones((1, 2, 3)))),
        AGGREGATE,
        Leave(b"session0", "boom"),
        Failure("mismatch", "no", {"member": 1, "got": [1, 2.5, None]}, KEY),
        StatusRequest(),
        Status({"groups": [{"job": "j"}]}),
        Heartbeat(b"session0", 7, 40, "shared_memory"),
        Pending(KEY, 3, "waiting"),
        Result(b"session0", AGGREGATE),
        StackRequest(b"digest00", 3),
        StackReport(b"session0", 3, "train.py:1 main", 1, "0", Members.of([0, 1]), 7, "barrier"),
        RoundDone(b"session0", KEY),
        SkewStats(b"session0", 7, "bn1\nbn2", np.full((2, 3, 4), 0.5)),
        RoundTrips(b"session0", 500, (0, 3, *[0] * 22)),
        LatenessReport(b"session0", 500, (0, 3, *[0] * 22)),
        NonFiniteRound(b"session0", KEY, Members.of([1]), "1 of 3 channels (inf)"),
        FiguresRequest("job", "world", 2),
        Figures("job", "world", 2, 4, "bn1\nbn2", np.full((2, 3, 4), 0.5)),
    )
}
