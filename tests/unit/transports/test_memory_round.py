"""One member's part in a round in shared memory: the session of the last member counts that member's delay."""

import re
from mmap import mmap

import numpy as np
import pytest

from client.native.library import DONE
from client.session.protocol.member import Member
from client.session.protocol.round_trip import RoundTrip
from client.session.protocol.session import Session
from client.transports import group_memory
from client.transports.group_memory import GroupMemory, size_of
from client.transports.shared_memory import MemoryRound
from client.transports.transport import key_digest
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows

pytestmark = pytest.mark.skipif(bool(group_memory.unavailable_reason()), reason=group_memory.unavailable_reason())

MEMBERS = 3


class Host:
    def __init__(self) -> None:
        memory = mmap(-1, size_of(MEMBERS))
        self.memories = [GroupMemory(memory, MEMBERS, me) for me in range(MEMBERS)]
        self.sessions = [
            Session(b"session%d" % me, Member("job", "world", 0, me, MEMBERS, 60.0, f"place {me}"))
            for me in range(MEMBERS)
        ]
        for session in self.sessions:
            session.members = Members.of(range(MEMBERS))

    def round(self, *, value: float = 1.0, order: tuple[int, ...] = (), **times: float) -> list[object]:
        """All members contribute at `times`, in order of time or in `order`; returns their results."""
        machines = {}
        found: dict[str, object] = {}
        for me in order or sorted(range(MEMBERS), key=lambda member: times[f"rank{member}"]):
            name = f"rank{me}"
            now = times[name]
            session = self.sessions[me]
            key, memory = session.forward_key("bn"), self.memories[me]
            memory.arrive(key_digest(key), Rows((1,), np.full((1, 2, 1), value)), now)
            machines[name] = MemoryRound(session, key, memory, now, lambda: "trip")
            found[name] = machines[name].begin(now)[2]
        end = max(times.values())
        return [found[name] or machines[name].step(end, None)[2] for name in sorted(times)]

    def late(self) -> list[list[float]]:
        for session in self.sessions:
            session.lateness.collect()
        return [[one.lateness.histogram.total, round(one.lateness.histogram.sum, 6)] for one in self.sessions]


TOGETHER = {"rank0": 1.0, "rank1": 1.0, "rank2": 1.0}


@pytest.mark.parametrize(
    ("rounds", "late"),
    [
        pytest.param(
            [
                TOGETHER,
                {"rank0": 2.0, "rank1": 2.03, "rank2": 2.005},
                {"rank0": 3.0, "rank1": 3.02, "rank2": 3.01},
                {"rank0": 4.004, "rank1": 4.0, "rank2": 4.001},
            ],
            [[1, 0.003], [2, 0.035], [0, 0.0]],
            id="the last member counts its delay after the last but one",
        ),
        # The system may deschedule a member after it has read its clock and before it arrives.
        pytest.param(
            [TOGETHER, {"rank0": 2.0, "rank1": 2.005, "rank2": 2.0, "order": (0, 1, 2)}],
            [[0, 0.0], [1, 0.005], [0, 0.0]],
            id="the time counts, not the order of the arrivals",
        ),
        pytest.param(
            [TOGETHER, {"rank0": 2.0, "rank1": 2.03, "rank2": 2.03}],
            [[0, 0.0]] * MEMBERS,
            id="two last members at the same time are not late",
        ),
        # The first round does not count: members start at different times.
        pytest.param([{"rank0": 1.0, "rank1": 30.0, "rank2": 1.0}], [[0, 0.0]] * MEMBERS, id="not the first round"),
    ],
)
def test_a_member_counts_its_delay_behind_all_others(rounds, late):
    host = Host()
    for one in rounds:
        assert all(isinstance(found, Aggregate) for found in host.round(**one))
    assert host.late() == late


def test_a_round_that_goes_to_the_server_is_counted_there():
    host = Host()
    host.round(rank0=1.0, rank1=1.0, rank2=1.0)
    found = host.round(rank0=2.0, rank1=2.03, rank2=2.005, value=float("nan"))
    assert found == ["trip"] * MEMBERS
    assert host.late() == [[0, 0.0]] * MEMBERS


@pytest.mark.parametrize("other", [0.5, 2.5, 1e6])
def test_times_of_another_clock_are_not_counted(other):
    host = Host()
    host.round(rank0=1.0, rank1=1.01, rank2=1.0)
    rows = Rows((1,), np.zeros((1, 2, 1)))
    for me, now in ((0, other), (2, 0.4), (1, 2.0)):
        found = host.memories[me].arrive(0, rows, now)
    assert found == DONE
    assert host.memories[1].behind_ns == 0


def test_missing_members_are_named_although_the_server_does_not_answer(caplog):
    host = Host()
    rows, key = Rows((1,), np.ones((1, 2, 1))), host.sessions[0].forward_key("bn")

    def begin_round(me):
        def trip():
            return RoundTrip(host.sessions[me], "ipc:///there", key, rows, lambda: 0.0)

        host.memories[me].arrive(key_digest(key), rows)
        machine = MemoryRound(host.sessions[me], key, host.memories[me], 0.0, trip)
        machine.begin(0.0)
        return machine

    begin_round(2)
    waiting = begin_round(0)
    for now in range(1, 18):
        waiting.step(float(now), None)
    (text,) = [record.getMessage() for record in caplog.records]
    assert re.search(
        r"the server at ipc:///there has not answered for 1\d s; waiting for it, or for another one there, for 5\d s "
        r"more. In shared memory the round waits for rank 1$",
        text,
    )
