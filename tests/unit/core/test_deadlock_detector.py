"""The deadlock detector checks small jobs at each tick, and large ones in a bounded share of the time."""

import pytest

from server.core import deadlock
from server.core.deadlock import DeadlockDetector
from server.group.contributor import STEADY_SECONDS, StackSample
from server.group.master import SyncMaster
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import StackReport
from support.strategies import contribution, key, register

TICK = 0.25


def group(job: str, members: int = 2, rounds: int = 0) -> SyncMaster:
    master = SyncMaster(b"server-0", register(job=job, world_size=members))
    for member in range(members):
        master.register_slave(0.0, register(member, members, job=job), b"peer")
    for step in range(rounds):
        contributor = master.membership.contributors[0]
        master.contribute(0.0, contributor, contribution(0, key=key(job=job, step=step)), b"peer")
    return master


@pytest.fixture
def checked_jobs(monkeypatch):
    jobs = []
    monkeypatch.setattr(deadlock, "find_deadlocks", lambda masters, *_: jobs.append(masters[0].membership.job))
    return jobs


def check_often(jobs: list[SyncMaster], times: int) -> None:
    detector = DeadlockDetector()
    for number in range(times):
        list(detector.find(number * TICK, {(master.membership.job, "world"): master for master in jobs}))


def test_small_jobs_are_checked_at_each_tick(checked_jobs):
    check_often([group("one", 2, 3), group("other", 16, 8)], 10)
    assert checked_jobs.count("one") == checked_jobs.count("other") == 10


def test_checks_of_a_large_job_take_a_twentieth_of_the_time(checked_jobs):
    large = group("large", 200, 250)
    check_often([large, group("small")], 100)
    size = 200 * 251
    most = 100 * TICK / (size * deadlock.PAUSE_SECONDS_EACH)
    assert 0.5 * most < checked_jobs.count("large") <= most + 1
    assert checked_jobs.count("small") == 100


def test_many_large_jobs_take_turns(checked_jobs, monkeypatch):
    monkeypatch.setattr(deadlock, "MAX_WAITS", 3000)
    jobs = [group(f"job {number}", 50, 30) for number in range(10)]
    check_often([*jobs, group("small")], 40)
    counts = {checked_jobs.count(f"job {number}") for number in range(10)}
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 1
    assert checked_jobs.count("small") == 40


def test_the_ranks_of_reported_collectives_count_for_the_size_of_a_job(checked_jobs):
    master = group("job", 16)
    for contributor in master.membership.contributors.values():
        contributor.stack_sample = StackSample(0.0, unanswered_since=0.0)
        where = StackReport(contributor.session, 0, "", 1, "0", Members.of(range(limits.MAX_MEMBERS)), 1)
        contributor.stack_sample.record_report(0.0, where)
        contributor.stack_sample.unanswered_since = 0.0
        contributor.stack_sample.record_report(STEADY_SECONDS, where)
    detector = DeadlockDetector()
    for number in range(100):
        list(detector.find(number * TICK, {("job", "world"): master}))
    size = 16 + 16 * limits.MAX_MEMBERS // deadlock.RANKS_PER_WAIT
    assert 0 < checked_jobs.count("job") <= 100 * TICK / (size * deadlock.PAUSE_SECONDS_EACH) + 1


def test_a_job_too_large_to_be_checked_hides_no_other(checked_jobs, monkeypatch):
    monkeypatch.setattr(deadlock, "MAX_WAITS", 3000)
    check_often([group("huge", 50, 200), group("middle", 50, 30)], 40)
    assert "huge" not in checked_jobs
    assert "middle" in checked_jobs


def test_a_deadlock_of_an_ordinary_job_is_reported_within_a_second():
    master = group("job", 64)
    contributors = list(master.membership.contributors.values())
    for contributor in contributors:
        message = contribution(contributor.member, key=key("a" if contributor.member % 2 else "b"))
        master.contribute(0.0, contributor, message, b"%d" % contributor.member)
    detector = DeadlockDetector()
    now, found = 0.0, []
    while not found:
        now += TICK
        found = list(detector.find(now, {("job", "world"): master}))
    assert now <= 1.0
    assert sum(len(wait.since) for wait in found[0]) == 64
