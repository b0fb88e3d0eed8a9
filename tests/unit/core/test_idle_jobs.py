"""Jobs without rounds, with ranks in collectives of torch: stack requests and deadlocks."""

import pytest

from server.core.deadlock import APART_SILENCES
from server.core.hang_probe import MOST_QUIET_MEMBERS, NO_ROUND_SECONDS, QUIET_ASKED_AT_MOST
from server.network.service import TICK_SECONDS
from statsd_bn.limits import HEARTBEAT_SECONDS, SILENCE_SECONDS
from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS, Heartbeat
from support.asked_job import LINE, Job, Process
from support.strategies import key, session_of

# Maximum delay of a deadlock report: the server sends requests at its ticks.
REPORT_SECONDS = NO_ROUND_SECONDS + APART_SILENCES * SILENCE_SECONDS + 4 * TICK_SECONDS


def quiet(world_size: int = 2, **given) -> Job:
    job = Job(world_size, **given)
    for member in range(world_size):
        job.contribute(member)
    return job


def held(kind: str, launched: int, group: str = "0") -> Process:
    return Process(f"{kind}, called from train.py:1 main", held_in=group, kind=kind, **{f"of_{group}": launched})


def members_with_mismatch(job: Job) -> set[int]:
    received = {member: messages for member, messages in job.inboxes.items() if messages}
    assert all([message.code for message in messages] == ["mismatch"] for messages in received.values())
    return set(received)


# Which members are asked.


def test_the_members_of_a_job_without_a_round_are_asked_where_they_are():
    job = quiet()
    job.pass_time(40.0)
    first, *later = [when for when, _ in job.requests[0]]
    assert NO_ROUND_SECONDS <= first <= NO_ROUND_SECONDS + TICK_SECONDS
    assert [round(when - first) for when in later] == [1, 3, 7, 15, 23, 31]
    assert job.requests[1] == job.requests[0]
    assert later[-1] - later[-2] == QUIET_ASKED_AT_MOST


@pytest.mark.parametrize("way", ["no round yet", "elastic", "large", "a heartbeat of another step", "broken"])
def test_the_members_of_an_ineligible_job_are_not_asked(way):
    size = MOST_QUIET_MEMBERS + 1 if way == "large" else 2
    job = Job(2) if way == "no round yet" else quiet(size, **({"min_members": 1} if way == "elastic" else {}))
    if way == "broken":
        job.dispatcher._registry.lose(job.now, session_of(1), "lost")
    for step in range(1, 10):
        if way == "a heartbeat of another step":
            job.handle(Heartbeat(session_of(0), 3 + step), b"beacon 0")
        job.pass_time(1.0)
        if way == "a heartbeat of another step":
            break
    first = [requests[0][0] for requests in job.requests.values() if requests]
    assert first == []


def test_rounds_in_shared_memory_prevent_stack_requests_too():
    job = quiet()
    for rounds in range(1, 20):
        job.handle(Heartbeat(session_of(0), 3, rounds), b"beacon 0")
        job.pass_time(1.0)
    assert job.requests[0] == []


def test_answers_of_a_quiet_job_are_forgotten_when_a_round_begins():
    job = quiet()
    job.processes = {0: held(BARRIER, 5), 1: Process(LINE)}
    job.pass_time(30.0)
    assert "is in barrier" in job.report()["members"][0]["where"]
    job.contribute(1, key(step=4))
    job.pass_time(TICK_SECONDS)
    assert "where" not in job.report()["members"][0]


def test_answers_delayed_by_the_server_are_dropped():
    job = quiet()
    job.processes = {0: held(BARRIER, 12), 1: held(BUFFERS, 12)}
    job.pass_time(NO_ROUND_SECONDS + 2 * TICK_SECONDS)
    assert "where" in job.report()["members"][0]
    job.now += 10.0
    job.pass_time(4 * TICK_SECONDS)
    assert members_with_mismatch(job) == set()
    job.pass_time(REPORT_SECONDS)
    assert members_with_mismatch(job) == {0, 1}


@pytest.mark.parametrize(("seconds", "are_dropped"), [(HEARTBEAT_SECONDS, False), (1.01 * HEARTBEAT_SECONDS, True)])
def test_only_a_delay_longer_than_a_heartbeat_drops_answers(seconds, are_dropped):
    job = quiet()
    job.processes = {0: held(BARRIER, 12), 1: held(BUFFERS, 12)}
    job.pass_time(NO_ROUND_SECONDS + 2 * TICK_SECONDS)
    job.now += seconds
    job.dispatcher.tick(job.now)
    assert ("where" not in job.report()["members"][0]) is are_dropped


# Deadlocks.


@pytest.mark.parametrize("numbers", [(12, 12), (12, 13), (12, 14)])
@pytest.mark.parametrize("kind", [BARRIER, ALL_REDUCE, ALL_GATHER])
def test_a_rank_in_a_script_collective_and_one_in_a_buffer_broadcast_are_reported(kind, numbers):
    job = quiet()
    job.processes = {0: held(kind, numbers[0]), 1: held(BUFFERS, numbers[1])}
    job.pass_time(REPORT_SECONDS)
    assert members_with_mismatch(job) == {0, 1}
    (failure,) = job.inboxes[1]
    assert f"rank 0 (place 0) is in {kind}, called from train.py:1 main" in failure.message
    assert "rank 1 (place 1) is in buffers, called" in failure.message
    assert [row["stack"].split(",")[0] for row in failure.fields["table"]] == [kind, BUFFERS]


@pytest.mark.parametrize("one", [BARRIER, ALL_REDUCE, ALL_GATHER])
@pytest.mark.parametrize("other", [BARRIER, ALL_REDUCE, ALL_GATHER])
def test_only_ranks_in_different_script_collectives_are_reported(one, other):
    job = quiet()
    job.processes = {0: held(one, 12), 1: held(other, 12)}
    job.pass_time(300.0)
    assert members_with_mismatch(job) == (set() if one == other else {0, 1})


def test_a_deadlock_in_collectives_is_reported_once_until_another_round():
    job = quiet()
    job.processes = {0: held(BARRIER, 12), 1: held(BUFFERS, 12)}
    job.pass_time(60.0)
    assert members_with_mismatch(job) == {0, 1}
    count = len(job.requests[0])
    job.pass_time(60.0)
    assert len(job.requests[0]) == count
    for member in (0, 1):
        job.contribute(member, key(step=4))
    job.pass_time(REPORT_SECONDS)
    assert [len(job.inboxes[member]) for member in (0, 1)] == [2, 2]


def test_one_rank_in_another_collective_than_seven_others_is_reported():
    job = quiet(8)
    job.processes = dict.fromkeys(range(8), held(BUFFERS, 13)) | {5: held(BARRIER, 12)}
    job.pass_time(REPORT_SECONDS)
    assert members_with_mismatch(job) == set(range(8))


def test_a_rank_in_a_barrier_that_the_others_cannot_reach_is_reported():
    """Rank 0, the source of the buffer broadcast, has finished it, and waits in a round of ours."""
    job = quiet(3)
    job.processes = {0: Process("train.py:57 main", of_0=13), 1: held(BARRIER, 12), 2: held(BUFFERS, 13)}
    job.contribute(0, key(step=4))
    assert set(job.pass_time(REPORT_SECONDS + 3.0)) == {0}
    assert members_with_mismatch(job) == {1, 2}


@pytest.mark.parametrize("kind", [BARRIER, ALL_REDUCE, ALL_GATHER])
def test_a_rank_in_a_script_collective_and_one_in_a_round_with_a_higher_count_are_reported(kind):
    job = quiet()
    job.processes = {0: Process("train.py:57 main", of_0=13), 1: held(kind, 12)}
    job.contribute(0, key(step=4))
    assert set(job.pass_time(REPORT_SECONDS + 3.0)) == {0}
    assert members_with_mismatch(job) == {1}


# Healthy jobs.


def healthy(job: Job) -> None:
    assert job.pass_time(600.0) == {}
    assert members_with_mismatch(job) == set()


SAVES, VALIDATES = Process("train.py:80 save"), Process("train.py:80 validate", of_0=12)
BARRIER_12 = held(BARRIER, 12)
WAITS = {
    "one saves a checkpoint": [SAVES, BARRIER_12, BARRIER_12],
    # Two ranks wait in different places, but the third one may run, so it is no deadlock.
    "the others wait for a computing rank in different collectives": [VALIDATES, BARRIER_12, held(BUFFERS, 12)],
    "a slow collective of all": [held(ALL_REDUCE, 12)] * 3,
    # The ranks that still receive have begun one operation fewer. A broadcast of the script has no kind.
    "a slow broadcast whose source waits in a barrier": [held(BARRIER, 13), *[held(BUFFERS, 12)] * 2],
    "a slow broadcast of the script": [held(BARRIER, 13), *[held("", 12)] * 2],
    # Ranks that have finished the broadcast wait in the forward pass, in the all_gather of e.g. nn.SyncBatchNorm.
    "some have finished a broadcast": [held(ALL_GATHER, 14), held(BUFFERS, 13), held(ALL_GATHER, 14)],
    **{f"in {kind!r}": [BARRIER_12, held(kind, 13)] for kind in ("", "reduce_scatter", "broadcast")},
}


@pytest.mark.parametrize("processes", WAITS.values(), ids=WAITS)
def test_ranks_that_wait_for_a_running_one_are_not_reported(processes):
    job = quiet(len(processes))
    job.processes = dict(enumerate(processes))
    healthy(job)


def test_ranks_in_collectives_of_different_groups_are_not_reported():
    job = quiet(4)
    job.ranks = {"0": range(4), "1": (0, 1)}
    job.processes = dict.fromkeys((0, 1), held(BARRIER, 3, "1")) | {2: held(ALL_REDUCE, 9), 3: held(ALL_REDUCE, 9)}
    healthy(job)


def test_ranks_that_advance_through_collectives_are_not_reported():
    job = quiet()
    for number in range(200):
        kinds = (BARRIER, BUFFERS) if number % 2 else (BUFFERS, BARRIER)
        job.processes = {member: held(kind, 12 + number) for member, kind in enumerate(kinds)}
        job.pass_time(5.0)
    assert members_with_mismatch(job) == set()


def test_a_late_rank_at_a_barrier_is_not_reported():
    job = quiet()
    job.processes = {0: held(BUFFERS, 12), 1: held(BARRIER, 13)}
    job.pass_time(100.0)
    job.processes[0] = held(BARRIER, 13)
    healthy(job)


@pytest.mark.parametrize(
    ("members", "other"), [((0, 1), {}), ((0, 1, 2), {1: held(BUFFERS, 12)})], ids=["silent", "left"]
)
def test_a_rank_that_does_not_answer_or_has_left_the_process_group_is_not_reported(members, other):
    job = quiet()
    job.ranks = {"0": members}
    job.processes = {0: held(BARRIER, 12), **other}
    healthy(job)


def test_a_rank_that_waits_for_a_rank_that_has_left_a_barrier_is_not_reported():
    job = quiet()
    job.processes = {0: Process("train.py:80 validate", of_0=12), 1: held(BARRIER, 12)}
    job.pass_time(100.0)
    job.processes = {0: Process("train.py:57 main", of_0=12), 1: Process("train.py:50 augment", of_0=12)}
    job.contribute(0, key(step=4))
    assert job.pass_time(100.0) == {}
    assert members_with_mismatch(job) == set()
