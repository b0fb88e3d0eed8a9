"""The end of a job is reported for some minutes, to its key only."""

import pytest

from server.core.dispatcher import Dispatcher
from server.core.registry import REMEMBERED_JOBS, REMEMBERED_SECONDS
from server.security.access import Principal
from statsd_bn.messages import Leave
from statsd_bn.wire import encode
from support.strategies import contribution, register, session_of


class Play:
    def __init__(self) -> None:
        self.dispatcher = Dispatcher(b"server-0", 100.0)

    def run(self, job: str = "job", causes: tuple[str, str] = ("", "")) -> None:
        for member in range(2):
            self.send(register(member, 2, job=job), job, member)
        for member, cause in enumerate(causes):
            self.send(Leave(session_of(member, job), cause), job, member)

    def send(self, message, job: str, member: int) -> None:
        self.dispatcher.receive(100.0, f"{job} {member}".encode(), encode(message))

    def ended(self, now: float = 100.0, **of) -> list[dict]:
        return self.dispatcher.report(now, **of)["ended"]


@pytest.fixture
def play():
    return Play()


def test_an_ended_job_is_reported_for_some_minutes(play):
    assert play.ended() == []
    play.run()
    (job,) = play.ended(130.0)
    assert job == {"job": "job", "epoch": 0, "world_size": 2, "rounds_done": 0, "lost": "", "seconds": 30.0}
    assert len(play.ended(99.9 + REMEMBERED_SECONDS)) == 1
    assert play.ended(100.0 + REMEMBERED_SECONDS) == []


def test_a_broken_job_is_reported_with_the_reason(play):
    play.run(causes=("ValueError: boom", ""))
    (job,) = play.ended()
    assert "rank 0" in job["lost"]
    assert "ValueError: boom" in job["lost"]


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_job_that_one_rank_left_too_early_is_reported_with_that_rank(play, leaves_first):
    for member in range(2):
        play.send(register(member, 2), "job", member)
    messages = [(contribution(1, 1.0), 1), (Leave(session_of(0), ""), 0)]
    for message, member in reversed(messages) if leaves_first else messages:
        play.send(message, "job", member)
    play.send(Leave(session_of(1), ""), "job", 1)
    (job,) = play.ended()
    assert "left before the others finished" in job["lost"]


def test_a_bounded_number_of_ended_jobs_is_reported_latest_first(play):
    for number in range(REMEMBERED_JOBS + 3):
        play.run(f"job {number}")
    names = [job["job"] for job in play.ended()]
    assert names == [f"job {number}" for number in range(REMEMBERED_JOBS + 2, 2, -1)]


def test_a_tenant_sees_only_its_own_ended_jobs(play):
    play.run("a-1")
    play.run("b-1")
    (job,) = play.ended(principal=Principal("alice", "k" * 40, ("a-*",)))
    assert job["job"] == "a-1"
