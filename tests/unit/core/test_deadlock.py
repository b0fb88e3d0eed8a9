"""Deadlocks are reported soon, and never while a member can still continue."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.core import deadlock
from server.core.deadlock import QUIET_SECONDS, THREADED_QUIET_SECONDS, stuck
from server.core.dispatcher import Dispatcher
from statsd_bn import limits, round_key
from statsd_bn.messages import Aggregate, Heartbeat, Message, Participation
from statsd_bn.round_key import BACKWARD, RoundKey
from statsd_bn.wire import encode
from support.dispatcher_play import mismatches, read
from support.strategies import contribution, key, register, rows

QUIET = QUIET_SECONDS
A, B = key("layer1.bn"), key("layer2.bn")
PAIR = key("layer1.bn", group="pair")


class Job:
    def __init__(self, world_size: int, dispatcher: Dispatcher | None = None, job: str = "job", **given: Any) -> None:
        self.now = 100.0
        self.dispatcher = dispatcher or Dispatcher(b"server-0", self.now)
        self.job = job
        self.given = given
        self.open("world", *range(world_size))

    def open(self, group: str, *members: int, size: int | None = None, **changed: Any) -> None:
        for member in members:
            given = {"place": f"host {member}, process {member}0", **self.given, **changed}
            mine = {"job": self.job, "group": group, "session": self.session(member, group)}
            self.send(register(member, size or len(members), **mine, **given), peer(member, group))

    def come_back(self, member: int) -> dict[bytes, Message]:
        given = {"place": f"host {member}, process {member}0", "session": self.session(member, "world")}
        back = register(member, 2, job=self.job, participation=Participation.REJOINING.value, **given)
        return self.send(back, peer(member))

    def send(self, message: Message, at: bytes) -> dict[bytes, Message]:
        return read(self.dispatcher.receive(self.now, at, encode(message)).replies)

    def contribute(
        self, member: int, where: RoundKey, thread: str = "", channels: int = 1, attempt: int = 0
    ) -> dict[bytes, Message]:
        message = contribution(member, rows(1.0, channels=channels), where, self.session(member, where.group))
        return self.send(replace(message, attempt=attempt), peer(member, thread))

    def session(self, member: int, group: str) -> bytes:
        return f"{self.job[:2]}{group[:3]}{member:03d}".encode()

    def wait(self, seconds: float) -> dict[bytes, Message]:
        """Lets the server tick while all members are alive; returns the messages by peer."""
        answers: dict[bytes, Message] = {}
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for session in list(self.dispatcher._registry.sessions):
                self.dispatcher.receive(self.now, b"beacon", encode(Heartbeat(session)))
            # Messages to the heartbeat socket are tested elsewhere.
            answers |= read([reply for reply in self.dispatcher.tick(self.now) if reply[0] != b"beacon"])
        return answers


def peer(member: int, thread: str = "") -> bytes:
    return f"{member} {thread}".strip().encode()


# Who is stuck.


def test_members_with_different_layer_orders_learn_who_waits_where():
    job = Job(2)
    job.contribute(0, key("layer1.bn", step=7))
    job.contribute(1, key("layer2.bn", step=7, call=3))
    answers = job.wait(QUIET)
    assert mismatches(answers) == {b"0", b"1"}
    text = (
        "deadlock: the ranks wait in different places\n"
        "  rank 0 (host 0, process 00)  waits 0.5 s  in forward of layer 'layer1.bn', call 0, step 7\n"
        "  rank 1 (host 1, process 10)  waits 0.5 s  in forward of layer 'layer2.bn', call 3, step 7\n"
        "  in job 'job', group 'world', epoch 0\n"
        "Run the same layers in the same order on every rank, equally often; "
        "a rank without rows passes an empty (0, C) tensor."
    )
    for answer, mine in ((answers[b"0"], key("layer1.bn", step=7)), (answers[b"1"], key("layer2.bn", step=7, call=3))):
        assert answer.key == mine
        assert answer.message == text
        assert answer.fields == {
            **mine.fields,
            "table": [
                {"members": [0], "nr_members": 1, "seconds": 0.5, "group": "world"}
                | {"step": 7, "layer": "layer1.bn", "call": 0, "phase": "forward"},
                {"members": [1], "nr_members": 1, "seconds": 0.5, "group": "world"}
                | {"step": 7, "layer": "layer2.bn", "call": 3, "phase": "forward"},
            ],
            "places": 2,
        }


@pytest.mark.parametrize(
    "odd",
    [B, key("layer1.bn", step=1), key("layer1.bn", call=1), key("layer1.bn", phase=BACKWARD)],
    ids=["it skips a layer", "a step more", "a forward pass more", "it is in the backward pass"],
)
def test_one_member_in_another_layer_ends_all_with_an_error(odd):
    job = Job(4)
    for member in range(3):
        job.contribute(member, A)
    job.contribute(3, odd)
    answers = job.wait(QUIET)
    assert mismatches(answers) == {b"0", b"1", b"2", b"3"}
    for each in answers.values():
        rows = [line for line in each.message.splitlines() if line.startswith("  rank ")]
        assert [row[:29] for row in rows] == [f"  rank {rank} (host {rank}, process {rank}0)" for rank in range(4)]
        assert all("  waits 0.5 s  in forward of layer 'layer1.bn'," in row for row in rows[:3])


def test_while_one_member_runs_the_others_wait_until_the_deadline():
    job = Job(3, deadline=60.0)
    job.contribute(0, A)
    job.contribute(1, B)
    assert job.wait(59.0) == {}
    answers = job.wait(2.0)
    assert {peer_id: answer.code for peer_id, answer in answers.items()} == {b"0": "timeout", b"1": "timeout"}


def test_threads_of_two_members_in_opposite_orders_are_not_stuck():
    job = Job(2)
    job.contribute(0, A, "a")
    job.contribute(1, B, "b")
    job.now += 0.3
    assert read(job.dispatcher.tick(job.now)) == {}
    assert set(job.contribute(0, B, "b")) == {b"0 b", b"1 b"}
    job.now += 0.3
    assert read(job.dispatcher.tick(job.now)) == {}
    assert set(job.contribute(1, A, "a")) == {b"0 a", b"1 a"}
    assert job.wait(5.0) == {}


def test_a_member_with_a_new_answer_counts_as_running_although_another_thread_waits():
    job = Job(2)
    job.contribute(0, A, "a")
    job.contribute(1, B, "b")
    for call in range(round(2 * THREADED_QUIET_SECONDS / 0.25)):
        job.now += 0.25
        assert read(job.dispatcher.tick(job.now)) == {}
        job.contribute(0, key("other", call=call), "c")
        assert set(job.contribute(1, key("other", call=call), "c")) == {b"0 c", b"1 c"}
    assert mismatches(job.wait(THREADED_QUIET_SECONDS)) == {b"0 a", b"1 b"}


def with_two_threads(**changed: Any) -> Job:
    job = Job(2)
    for member in (0, 1):
        job.contribute(member, A, "a", **changed)
        job.contribute(member, B, "b", **changed)
    return job


def test_a_member_that_has_further_threads_is_given_more_time():
    job = with_two_threads()
    a, b = (where._replace(step=1) for where in (A, B))
    job.contribute(0, a, "a")
    job.contribute(1, b, "b")
    assert job.wait(3.0) == {}
    assert set(job.contribute(0, b, "b")) == {b"0 b", b"1 b"}
    assert job.wait(3.0) == {}
    assert set(job.contribute(1, a, "a")) == {b"0 a", b"1 a"}
    job.contribute(1, b._replace(step=2), "b")
    job.contribute(0, a._replace(step=2), "a")
    assert job.wait(THREADED_QUIET_SECONDS - 0.25) == {}
    assert mismatches(job.wait(0.25)) == {b"0 a", b"1 b"}


def test_a_member_all_of_whose_threads_wait_is_given_no_more_time():
    job = with_two_threads()
    for step, member in ((1, 0), (2, 1)):
        job.contribute(member, A._replace(step=step), "a")
        job.contribute(member, B._replace(step=step), "b")
    assert mismatches(job.wait(QUIET)) == {b"0 a", b"0 b", b"1 a", b"1 b"}


def test_contributions_that_are_sent_again_in_a_bunch_do_not_count_as_threads():
    job = with_two_threads(attempt=1)
    job.contribute(0, A._replace(step=1))
    job.contribute(1, B._replace(step=1))
    assert mismatches(job.wait(2 * QUIET)) == {b"0", b"1"}


def test_a_member_with_a_new_error_counts_as_running():
    for way in ("timeout", "mismatch"):
        job = Job(2)
        job.open("pair", 0, 1, deadline=0.5)
        job.contribute(0, A, "a")
        job.contribute(1, B, "b")
        job.contribute(0, PAIR, "c")
        answers = job.wait(0.25)
        if way == "mismatch":
            answers = job.contribute(1, PAIR, "d", channels=2)
        answers |= job.wait(0.25)
        assert {answer.code for answer in answers.values()} == {way}
        assert b"0 c" in answers
        assert not {b"0 a", b"1 b"}.intersection(answers)
        assert mismatches(job.wait(QUIET)) == {b"0 a", b"1 b"}


def test_a_member_of_a_newly_open_group_counts_as_running():
    job = Job(2)
    job.contribute(0, A, "a")
    job.contribute(1, B, "b")
    job.wait(0.25)
    job.open("pair", 0, 1)
    assert job.wait(QUIET - 0.25) == {}
    assert mismatches(job.wait(0.25)) == {b"0 a", b"1 b"}


def test_each_new_contribution_begins_the_quiet_time_anew_and_a_repeated_one_does_not():
    job = Job(4)
    for member, where in enumerate((A, B, A, B)):
        assert job.wait(0.25) == {}
        job.contribute(member, where)
    assert job.wait(QUIET - 0.25) == {}
    assert job.contribute(0, A, "again") == {}
    assert mismatches(job.wait(0.25)) == {b"0 again", b"1", b"2", b"3"}


def test_after_a_mismatch_the_rounds_are_over():
    job = Job(2)
    job.contribute(0, A)
    job.contribute(1, B)
    answers = job.wait(QUIET)
    assert job.wait(5.0) == {}
    assert job.contribute(0, A, "again")[b"0 again"] == answers[b"0"]
    # A late contribution gets the same error, and nothing waits there.
    assert job.contribute(1, A)[b"1"] == answers[b"0"]
    (group,) = job.dispatcher.report(job.now)["groups"]
    assert (group["waiting"], group["rounds_failed"], group["lost"]) == ([], 2, "")


def test_two_jobs_do_not_mix():
    left = Job(2, job="left")
    right = Job(2, left.dispatcher, job="right")
    left.contribute(0, key("layer1.bn", job="left"), "left")
    right.contribute(1, key("layer2.bn", job="right"), "right")
    assert [len(group["waiting"]) for group in left.dispatcher.report(left.now)["groups"]] == [1, 1]
    assert left.wait(5.0) == {}
    left.contribute(1, key("layer2.bn", job="left"), "left")
    assert mismatches(left.wait(QUIET)) == {b"0 left", b"1 left"}


# Several groups.


def test_members_that_wait_for_each_other_in_two_groups_get_the_error():
    job = Job(2)
    job.open("pair", 0, 1)
    job.contribute(0, PAIR)
    job.contribute(1, A)
    answers = job.wait(QUIET)
    assert mismatches(answers) == {b"0", b"1"}
    assert "waits 0.5 s  in forward of layer 'layer1.bn', step 0, group 'pair'" in answers[b"0"].message
    assert "waits 0.5 s  in forward of layer 'layer1.bn', step 0, group 'world'" in answers[b"0"].message
    assert [answers[peer_id].key for peer_id in (b"0", b"1")] == [PAIR, A]


def test_members_of_a_ring_of_groups_are_stuck():
    """0 waits for 1, 1 for 2, and 2 for 0. Member 3 waits for 0; member 4 runs, but nobody waits for it."""
    job = Job(5)
    names = ("ring0", "rong1", "rung2")
    for member, name in enumerate(names):
        job.open(name, member, (member + 1) % 3)
        job.contribute(member, key(group=name))
    job.open("with", 3, 0)
    job.contribute(3, key(group="with"))
    assert mismatches(job.wait(QUIET)) == {b"0", b"1", b"2", b"3"}


def test_a_member_that_waits_for_a_group_to_open_can_be_in_a_deadlock():
    """The first use of a group waits for all its members, so a mismatch often shows there first."""
    job = Job(2)
    job.open("pair", 0, size=2)
    job.contribute(1, A)
    assert job.wait(QUIET - 0.25) == {}
    job.open("pair", 0, size=2)  # rank 0 asks again, which changes nothing
    answers = job.wait(0.25)
    assert mismatches(answers) == {b"0 pair", b"1"}
    assert "rank 0 (host 0, process 00)  waits 0.5 s  for group 'pair' to open" in answers[b"1"].message
    first = answers[b"0 pair"]
    assert first.key is None
    assert first.message.startswith("deadlock: the ranks wait")
    assert list(first.fields) == ["job", "group", "table", "places"]
    assert {"members": [0], "nr_members": 1, "seconds": 0.5, "group": "pair"} in first.fields["table"]
    assert [group["group"] for group in job.dispatcher.report(job.now)["groups"]] == ["world"]


def test_a_member_that_missed_why_its_group_ended_learns_it_by_asking_again():
    job = Job(2)
    job.open("pair", 0, size=2)
    job.contribute(1, A)
    job.wait(QUIET)
    answers = job.send(register(0, 2, job="job", group="pair", session=job.session(0, "pair")), b"0 anew")
    assert mismatches(answers) == {b"0 anew"}
    assert "its ranks waited in different places" in answers[b"0 anew"].message


def test_members_that_wait_for_different_groups_to_open_get_one_error():
    job = Job(2)
    job.open("left", 0, size=2)
    job.open("rest", 1, size=2)
    assert mismatches(job.wait(QUIET)) == {b"0 left", b"1 rest"}
    assert job.wait(5.0) == {}


def test_a_member_that_waits_for_all_to_come_back_can_be_in_a_deadlock():
    job = Job(2)
    job.open("pair", 0, 1)
    job.come_back(0)
    job.contribute(1, PAIR)
    assert job.wait(THREADED_QUIET_SECONDS - 0.5) == {}, "another thread of rank 0 may still contribute"
    answers = job.wait(0.5)
    assert mismatches(answers) == {b"0", b"1"}
    assert "rank 0 (host 0, process 00)  waits 10.0 s  for all ranks to leave client.join\n" in answers[b"1"].message
    assert answers[b"0"].message.endswith(deadlock.ADVICE_FOR_PASSES)
    assert job.wait(5.0) == {}, "reported once"


def test_a_member_that_waited_after_a_pass_may_ask_again_after_a_deadlock():
    job = Job(2)
    job.open("pair", 0, 1)
    job.come_back(0)
    job.contribute(1, PAIR)
    job.wait(THREADED_QUIET_SECONDS)
    job.come_back(0)
    assert job.wait(15.0) == {}, "the other member runs"
    assert [answer.missing for answer in job.come_back(1).values()] == [0, 0]


@pytest.mark.parametrize(
    ("size", "prepare"),
    [
        (2, lambda job: job.come_back(0)),
        (0, lambda job: job.open("world", 0, size=2)),
        (0, lambda job: (job.open("left", 0, size=2), job.open("rest", 1, size=2))),
        (3, lambda job: (job.open("pair", 0, size=2), job.contribute(1, A))),
        # The group may never fill, but a member that joins the job anew might fill it, and there is a deadline.
        (2, lambda job: (job.open("pair", 0, size=3), job.contribute(1, A))),
    ],
    ids=["back from a pass", "incomplete world", "groups without a world", "one of three runs", "too large a group"],
)
def test_no_deadlock_is_reported_while_members_wait_for_running_or_new_members(size, prepare):
    job = Job(size)
    prepare(job)
    assert job.wait(30.0) == {}


# The text stays short.


def test_the_error_of_a_thousand_members_is_short():
    job = Job(1000)
    for member in range(1000):
        job.contribute(member, B if member == 7 else A)
    answers = job.wait(QUIET)
    assert len(mismatches(answers)) == 1000
    text = answers[b"999"].message
    assert text.splitlines()[1:6] == [
        "  rank 0 (host 0, process 00)  waits 0.5 s  in forward of layer 'layer1.bn', step 0",
        "  rank 1 (host 1, process 10)  waits 0.5 s  in forward of layer 'layer1.bn', step 0",
        "  rank 2 (host 2, process 20)  waits 0.5 s  in forward of layer 'layer1.bn', step 0",
        "  ... and 996 more ranks in forward of layer 'layer1.bn', step 0",
        "  rank 7 (host 7, process 70)  waits 0.5 s  in forward of layer 'layer2.bn', step 0",
    ]
    row, odd = answers[b"999"].fields["table"]
    assert (row["nr_members"], row["members"]) == (999, [*range(7), *range(8, 65)])
    assert (odd["nr_members"], odd["members"]) == (1, [7])


def test_the_error_of_many_places_names_the_most_crowded_ones():
    job = Job(200, place="h" * limits.MAX_NAME_BYTES)
    for member in range(200):
        job.contribute(member, key("é" * 120 + f"{max(0, member - 1):03d}"))
    answers = job.wait(QUIET)
    assert len(mismatches(answers)) == 200
    for answer in answers.values():
        assert len(answer.message.encode()) <= limits.MAX_TEXT_BYTES
        assert answer.message.splitlines()[1].startswith("  rank 0 (hhh")
        assert " more places\n  in job 'job', group 'world', epoch 0\n" in answer.message
        assert answer.message.endswith(round_key.ADVICE)
        assert len(encode(answer)) < 8 * limits.MAX_TEXT_BYTES
        assert (answer.fields["places"], len(answer.fields["table"])) == (199, deadlock.MAX_POSITIONS)


# Comparison of the detector with the definition of a deadlock.

PEOPLE = range(5)
some = st.sets(st.sampled_from(PEOPLE), min_size=1)


def subsets(members: Iterable[int]) -> Iterable[set[int]]:
    members = list(members)
    return map(set, chain.from_iterable(combinations(members, size) for size in range(len(members) + 1)))


@given(
    st.lists(st.tuples(some, some).map(lambda pair: (pair[0], pair[1] - pair[0])), max_size=6), st.sets(some.map(min))
)
def test_members_that_wait_only_for_each_other_are_stuck(waits, running):
    blocked = set().union(*(waiting for waiting, _ in waits)) - running
    closed = [
        chosen
        for chosen in subsets(blocked)
        if all(missing <= chosen for waiting, missing in waits if waiting & chosen)
    ]
    assert stuck(waits, running) == max(closed, key=len)


programs = st.lists(
    st.sampled_from(("world", "left", "rest")).flatmap(lambda group: st.tuples(st.just(group), st.sampled_from("xy"))),
    max_size=4,
)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(1, 4))
def test_a_mismatch_is_raised_exactly_if_no_member_can_continue(data, n):
    groups = {name: sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))) for name in ("left", "rest")}
    groups["world"] = list(range(n))
    job = Job(n)
    for name in ("left", "rest"):
        job.open(name, *groups[name])
    steps = [[(group, layer) for group, layer in data.draw(programs) if member in groups[group]] for member in range(n)]
    places = _run(job, steps)
    answers = job.wait(QUIET)
    ended = {member for member in range(n) if places[member] is None}
    reaches: dict[int, set[int]] = {}
    for member in set(range(n)) - ended:
        reaches[member] = {other for other in groups[places[member].group] if places[other] != places[member]}
    for _ in range(n):
        for member, others in reaches.items():
            reaches[member] = others.union(*(reaches.get(other, set()) for other in others))
    assert mismatches(answers) == {peer(member) for member, others in reaches.items() if not others & ended}


def _run(job: Job, steps: list[list[tuple[str, str]]]) -> list[RoundKey | None]:
    """Runs the members' programs until all wait or end; returns the round of each, None if its program has ended."""
    waiting: list[RoundKey | None] = [None] * len(steps)
    calls: list[dict[tuple[str, str], int]] = [{} for _ in steps]
    done = [0] * len(steps)
    moved = True
    while moved:
        moved = False
        for member, program in enumerate(steps):
            if waiting[member] or done[member] == len(program):
                continue
            moved = True
            group, layer = place = program[done[member]]
            call = calls[member].get(place, 0)
            calls[member][place] = call + 1
            done[member] += 1
            waiting[member] = key(layer, group=group, call=call)
            for peer_id, answer in job.contribute(member, waiting[member]).items():
                assert isinstance(answer, Aggregate)
                waiting[int(peer_id)] = None
    return waiting
