"""Stack requests to late members: whom the server asks, its reports, and deadlocks in torch's collectives."""

from copy import deepcopy
from dataclasses import replace

import pytest

from server.group.contributor import MOST_RUNS, SILENT_SECONDS, StackSample, group_of
from server.network.service import TICK_SECONDS
from statsd_bn.members import Members
from statsd_bn.messages import Leave, Participation, StackReport
from support.asked_job import LINE, Job, Process
from support.dispatcher_play import mismatches
from support.strategies import key, register, session_of

# Which members the server asks, and where their answers go.


def test_no_member_is_asked_before_another_has_waited_for_a_second():
    job = Job(2)
    for step in range(20):
        job.contribute(0, key(step=step))
        job.pass_time(0.75)
        job.contribute(1, key(step=step))
    job.pass_time(1.75)
    assert job.requests == {0: [], 1: []}


def test_a_late_member_is_asked_after_a_second_and_then_at_doubling_intervals():
    job = Job(3)
    job.processes[1] = job.processes[2] = Process(LINE)
    job.contribute(0)
    job.pass_time(40.0)
    assert job.requests[0] == [], "rank 0 waits for the others"
    assert [round(when) for when, _ in job.requests[1]] == [1, 2, 4, 8, 16, 32]
    assert job.requests[2] == job.requests[1]


def test_the_answer_of_a_late_member_reaches_waiting_members_and_the_status():
    job = Job(3)
    job.processes[1] = Process(LINE)
    job.contribute(0)
    job.pass_time(1.5)
    assert job.pending(0).stacks == f"rank 1 is in {LINE}, for 0 s"
    job.pass_time(12.0)
    assert "has waited 13 s for rank 1 (place 1), rank 2 (place 2)" in job.pending(0).message
    assert job.pending(0).stacks.startswith(f"rank 1 is in {LINE}, for 12 s; rank 2")
    assert job.report()["members"][1]["where"] == f"is in {LINE}, for 12 s"
    assert "where" not in job.report()["members"][0]


def test_the_answer_of_a_late_member_is_dropped_after_its_contribution():
    job = Job(2)
    job.processes[1] = Process(LINE)
    job.contribute(0)
    job.pass_time(3.0)
    job.contribute(1)
    job.pass_time(TICK_SECONDS)
    assert "where" not in job.report()["members"][1]
    assert job.dispatcher._hang_probe._sampled == {}


def test_a_member_that_does_not_answer_is_reported():
    job = Job(2)
    job.contribute(0)
    job.pass_time(1.0 + SILENT_SECONDS + 10 * TICK_SECONDS)
    assert job.pending(0).stacks == "rank 1 has not answered a stack request for 4 s"


def test_a_timeout_says_where_the_late_member_is():
    job = Job(2, deadline=6.0)
    job.processes[1] = Process(LINE)
    job.contribute(0)
    (failure,) = job.pass_time(7.0).values()
    assert failure.code == "timeout"
    assert f"rank 1 (place 1) is in {LINE}, for 5 s" in failure.message


def test_a_hostile_stack_cannot_forge_a_line():
    job = Job(2)
    job.processes[1] = Process("train.py:1 f\nrank 0 has failed")
    job.contribute(0)
    job.pass_time(2.0)
    assert r"train.py:1 f\nrank 0 has failed" in job.pending(0).stacks


def test_stack_reports_that_were_not_requested_change_nothing():
    job = Job(2)
    answer = StackReport(session_of(1), 7, "forged", 0, "", Members.of(()), 0)
    job.handle(answer, b"beacon 1")
    job.contribute(0)
    job.pass_time(1.5)
    job.handle(answer, b"beacon 1")
    assert job.pending(0).stacks == ""


def test_a_thousand_stack_requests_keep_no_more_data_than_one():
    job = Job(2, deadline=86_400.0)
    job.contribute(0)
    contributor = job.dispatcher._registry.sessions[session_of(1)].contributor
    job.pass_time(1.5)
    for number in range(1000):
        contributor.stack_sample.due = job.now
        job.processes[1] = Process(f"train.py:{number} f", held_in="0", of_0=number)
        job.pass_time(TICK_SECONDS)
    assert len(job.requests[1]) > 1000
    assert len(contributor.stack_sample.launched) == 1
    assert len(job.dispatcher._hang_probe._sampled) <= 2


@pytest.mark.parametrize(("runs", "members"), [(MOST_RUNS, range(0, 2 * MOST_RUNS, 2)), (MOST_RUNS + 1, ())])
def test_of_a_report_with_too_many_runs_of_ranks_only_the_stack_is_kept(runs, members):
    job = Job(2)
    job.ranks = {"0": range(0, 2 * runs, 2)}
    job.processes[1] = Process(LINE, held_in="0", of_0=14)
    job.contribute(0)
    job.pass_time(1.5)
    sighting = job.dispatcher._registry.sessions[session_of(1)].contributor.stack_sample
    assert list(sighting.latest.members) == list(members)
    assert len(sighting.launched) == bool(members)
    assert LINE in job.pending(0).stacks


# A deadlock with a collective of torch.


def test_a_rank_after_a_pass_and_a_rank_in_a_collective_are_reported_within_5_seconds():
    job = Job(2)
    job.processes = {0: Process("train.py:44 main", of_0=12), 1: Process(LINE, held_in="0", of_0=14)}
    job.send(register(0, participation=Participation.REJOINING.value), b"0")
    failures = job.pass_time(4.75)
    assert mismatches(failures) == {0}
    for text in (failures[0].message, job.inboxes[1][0].message):
        assert "rank 0 (place 0)  waits 2.5 s  for all ranks to leave client.join\n" in text
        assert "rank 1 (place 1)  waits 1.5 s  in a collective of torch\n" in text
    requests = deepcopy(job.requests)
    job.pass_time(20.0)
    assert job.requests == requests, "no rank waits any more"


def test_ranks_for_which_a_rank_waits_after_a_pass_are_asked_after_a_second():
    job = Job(3)
    job.send(register(1, 3, participation=Participation.REJOINING.value), b"1")
    job.pass_time(10.0)
    assert [round(when) for when, _ in job.requests[0]] == [1, 2, 4, 8]
    assert job.requests[1] == []
    assert job.requests[2] == job.requests[0]


def test_a_rank_in_a_round_and_a_rank_in_a_collective_are_reported_within_5_seconds():
    job = Job(2)
    job.processes = {0: Process(LINE, held_in="0", of_0=14), 1: Process("train.py:44 main", of_0=12)}
    job.contribute(1)
    failures = job.pass_time(4.75)
    assert mismatches(failures) == {1}
    for text in (failures[1].message, job.inboxes[0][0].message):
        assert "rank 0 (place 0)  waits 1.5 s  in a collective of torch\n" in text
        assert f"rank 0 (place 0) is in {LINE}, for 2 s\n" in text
        assert "rank 1 (place 1)  waits 2.5 s  in forward of layer 'bn1', step 3\n" in text
    assert [row.get("stack") for row in failures[1].fields["table"]] == [LINE, None]
    assert job.inboxes[0][0].key is None


@pytest.mark.parametrize("other", [{1: Process(of_0=14)}, {1: Process(of_0=15)}, {}], ids=["14", "15", "unknown"])
def test_a_collective_does_not_wait_for_a_rank_that_has_begun_it_or_is_unknown(other):
    job = Job(2)
    job.processes = {0: Process(LINE, held_in="0", of_0=14), **other}
    job.contribute(1)
    assert job.pass_time(60.0) == {}


@pytest.mark.parametrize(("held", "waiting"), [(range(14, 134), [12] * 120), ([200] * 120, range(12, 132))])
def test_no_deadlock_is_reported_while_a_rank_still_begins_collectives(held, waiting):
    job = Job(2)
    job.contribute(1)
    for of_held, of_waiting in zip(held, waiting, strict=True):
        job.processes = {0: Process(LINE, held_in="0", of_0=of_held), 1: Process(of_0=of_waiting)}
        assert job.pass_time(0.5) == {}


def test_a_collective_whose_group_lacks_the_waiting_rank_does_not_wait_for_it():
    job = Job(3)
    job.ranks = {"0": range(3), "1": (0, 2)}
    job.processes = {0: Process(LINE, held_in="1", of_1=4), 1: Process(of_0=3), 2: Process("train.py:9 load")}
    job.contribute(1)
    assert job.pass_time(60.0) == {}


def test_no_deadlock_is_reported_while_a_rank_runs():
    job = Job(4)
    held = Process(LINE, held_in="0", of_0=14)
    job.processes = {0: held, 1: held, 2: Process("train.py:9 load"), 3: Process(of_0=12)}
    job.contribute(3)
    assert job.pass_time(60.0) == {}


def test_all_ranks_of_a_deadlock_in_rounds_and_collectives_get_the_error():
    job = Job(5)
    for member in (0, 1):
        job.processes[member] = Process(LINE, held_in="0", of_0=14)
    for member in (2, 3, 4):
        job.processes[member] = Process(of_0=12)
    for member in (2, 3):
        job.contribute(member)
    job.contribute(4, key("bn2", step=3))
    assert mismatches(job.pass_time(4.75)) == {2, 3, 4}
    assert [len(job.inboxes[member]) for member in range(5)] == [1, 1, 0, 0, 0]


# The report that a job is broken.


@pytest.mark.parametrize(
    ("cause", "text"),
    [("RuntimeError: boom", "failed with RuntimeError: boom"), ("", "left before the others finished")],
)
def test_all_members_of_a_broken_strict_job_learn_it_once_at_a_heartbeat(cause, text):
    job = Job(3)
    job.handle(Leave(session_of(1), cause), b"1")
    job.pass_time(5.0)
    for member in (0, 2):
        (failure,) = job.inboxes[member]
        assert failure.code == "replica_lost"
        assert text in failure.message
        assert failure.key is None


def test_an_elastic_job_continues_without_an_error():
    job = Job(3, min_members=1)
    job.handle(Leave(session_of(1), "RuntimeError: boom"), b"1")
    job.pass_time(5.0)
    assert job.inboxes[0] == job.inboxes[2] == []


def test_a_stack_sample_ignores_an_answer_to_an_earlier_request():
    sighting = StackSample(0.0)
    sighting.record_request(0.0, 1)
    sighting.record_request(1.0, 2)
    sighting.record_report(1.1, StackReport(b"session0", 1, "old", 0, "", Members.of(()), 0))
    assert sighting.describe(1.2).startswith("has not answered")
    sighting.record_report(1.3, StackReport(b"session0", 2, "new", 0, "", Members.of(()), 0))
    assert sighting.describe(3.3) == "is in new, for 2 s"


def test_a_stack_sample_forgets_the_launched_operations_of_a_rank_that_has_moved():
    sighting = StackSample(0.0)
    for number, (stack, group) in enumerate([("one", "0"), ("one", "0"), ("two", "1")]):
        sighting.record_request(float(number), number)
        sighting.record_report(float(number), StackReport(b"session0", number, stack, 1, group, Members.of([0, 1]), 5))
        known = sighting.has_launched(group_of(replace(sighting.latest, torch_group="0")), 6)
        assert known is (None, False, None)[number]
