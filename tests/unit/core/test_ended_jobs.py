"""What became of a job is told for some minutes after its end, to whom it concerns."""

import pytest

from server.core.dispatcher import Dispatcher
from server.core.registry import REMEMBERED_JOBS, REMEMBERED_SECONDS
from server.security.access import ANONYMOUS, Principal
from statsd_bn.messages import Leave
from statsd_bn.wire import encode
from support.strategies import contribution, register, session_of


class Play:
    """A server, and jobs of two members that come and leave."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(b"server-0", 100.0)

    def run(self, job: str = "job", causes: tuple[str, str] = ("", ""), tenant: Principal = ANONYMOUS) -> None:
        for member in range(2):
            self.say(register(member, 2, job=job), job, member, tenant)
        for member, cause in enumerate(causes):
            self.say(Leave(session_of(member, job), cause), job, member, tenant)

    def say(self, message, job: str, member: int, tenant: Principal = ANONYMOUS) -> None:
        self.dispatcher.receive(100.0, f"{job} {member}".encode(), encode(message), tenant)

    def ended(self, now: float = 100.0, **of) -> list[dict]:
        return self.dispatcher.report(now, **of)["ended"]


@pytest.fixture
def play():
    return Play()


def test_a_job_that_all_have_left_is_told_for_some_minutes(play):
    assert play.ended() == []
    play.run()
    (job,) = play.ended(130.0)
    assert job == {"job": "job", "epoch": 0, "world_size": 2, "rounds_done": 0, "lost": "", "seconds": 30.0}
    assert len(play.ended(99.9 + REMEMBERED_SECONDS)) == 1
    assert play.ended(100.0 + REMEMBERED_SECONDS) == []


def test_a_job_that_broke_is_told_with_the_reason(play):
    play.run(causes=("ValueError: boom", ""))
    (job,) = play.ended()
    assert "rank 0" in job["lost"]
    assert "ValueError: boom" in job["lost"]


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_job_that_one_rank_left_too_early_is_told_with_that(play, leaves_first):
    for member in range(2):
        play.say(register(member, 2), "job", member)
    said = [(contribution(1, 1.0), 1), (Leave(session_of(0), ""), 0)]
    for message, member in reversed(said) if leaves_first else said:
        play.say(message, "job", member)
    play.say(Leave(session_of(1), ""), "job", 1)
    (job,) = play.ended()
    assert "left before the others finished" in job["lost"]


def test_so_many_are_remembered_and_the_latest_come_first(play):
    for number in range(REMEMBERED_JOBS + 3):
        play.run(f"job {number}")
    names = [job["job"] for job in play.ended()]
    assert names == [f"job {number}" for number in range(REMEMBERED_JOBS + 2, 2, -1)]


def test_a_tenant_is_told_of_its_own_jobs_only(play):
    play.run("a-1")
    play.run("b-1")
    (job,) = play.ended(principal=Principal("alice", "k" * 40, ("a-*",)))
    assert job["job"] == "a-1"


def test_who_has_many_jobs_makes_the_server_forget_none_of_others(play):
    alice, bob = (Principal(name, name[0] * 40, ("*",)) for name in ("alice", "bob"))
    play.run("alice's", tenant=alice)
    for number in range(2 * REMEMBERED_JOBS):
        play.run(f"bob's {number}", tenant=bob)
    names = [job["job"] for job in play.ended()]
    assert names == [f"bob's {2 * REMEMBERED_JOBS - 1 - place}" for place in range(REMEMBERED_JOBS - 1)] + ["alice's"]
