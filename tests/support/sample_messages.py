"""One sound message of each type."""

import numpy as np

from statsd_bn import messages
from statsd_bn.members import Members
from statsd_bn.reduction import Rows
from support.strategies import KEY, register

AGGREGATE = messages.Aggregate(KEY, 1, 1, Members.of([0]), np.ones((2, 3)))

SAMPLES: dict[type[messages.Message], messages.Message] = {
    type(message): message
    for message in (
        register(),
        messages.Registered(b"session0", b"server00", 1, 2, 4, Members.of([3, 300])),
        messages.Contribution(b"session0", KEY, 0, Rows((1,), np.ones((1, 2, 3)))),
        AGGREGATE,
        messages.Leave(b"session0", "boom"),
        messages.Failure("mismatch", "no", {"member": 1, "got": [1, 2.5, None]}, KEY),
        messages.StatusRequest(),
        messages.Status({"groups": [{"job": "j"}]}),
        messages.Heartbeat(b"session0", 7, 40, "shared_memory"),
        messages.Pending(KEY, 3, "waiting"),
        messages.Result(b"session0", AGGREGATE),
        messages.StackRequest(b"digest00", 3),
        messages.StackReport(b"session0", 3, "train.py:1 main", 1, "0", Members.of([0, 1]), 7, "barrier"),
        messages.RoundDone(b"session0", KEY),
        messages.SkewStats(b"session0", 7, "bn1\nbn2", np.full((2, 3, 4), 0.5)),
        messages.RoundTrips(b"session0", 500, (0, 3, *[0] * 22)),
        messages.LatenessReport(b"session0", 500, (0, 3, *[0] * 22)),
        messages.NonFiniteRound(b"session0", KEY, Members.of([1]), "1 of 3 channels (inf)"),
        messages.FiguresRequest("job", "world", 2),
        messages.Figures("job", "world", 2, 4, "bn1\nbn2", np.full((2, 3, 4), 0.5)),
    )
}
