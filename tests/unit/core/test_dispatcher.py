from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.core import ended
from server.core.dispatcher import Dispatcher
from server.limits.account import CONTRIBUTION_BYTES, FUTURE_BYTES, GROUP_BYTES, MEMBER_BYTES, ROUND_BYTES
from statsd_bn import limits
from statsd_bn.errors import ReplicaLost
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import (
    Aggregate,
    Failure,
    Heartbeat,
    Leave,
    Message,
    Pending,
    Registered,
    Result,
    Status,
    StatusRequest,
)
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.tokens import digest
from statsd_bn.wire import decode, encode
from support.pure_members import PureWorld
from support.strategies import KEY, contribution, key, messages, register, rows, session_of

SERVER = b"server-0"
STRANGER = b"stranger"

Answers = dict[bytes, Message]


class Play:
    """A dispatcher and its members; every member of every job speaks from a peer of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(SERVER, self.now)

    def say(self, message: Message, at: bytes) -> Answers:
        return read(self.dispatcher.receive(self.now, at, encode(message)).replies)

    def join(self, member: int, world_size: int = 2, at: bytes = b"", **given: Any) -> Answers:
        registration = register(member, world_size, **given)
        return self.say(registration, at or peer(member, registration.job))

    def open(self, world_size: int = 2, **given: Any) -> None:
        for member in range(world_size):
            self.join(member, world_size, **given)

    def bring(self, member: int, brought: Rows | float = 1.0, key: RoundKey = KEY, **given: Any) -> Answers:
        return self.say(contribution(member, brought, key, **given), peer(member, key.job))

    def leave(self, member: int, cause: str = "", job: str = "job") -> Answers:
        return self.say(Leave(session_of(member, job), cause), peer(member, job))

    @property
    def report(self) -> dict[str, Any]:
        return self.dispatcher.report(self.now)

    @property
    def groups(self) -> list[tuple[str, str, int]]:
        return [(group["job"], group["group"], group["epoch"]) for group in self.report["groups"]]


def read(replies: list[tuple[bytes, bytes]]) -> Answers:
    """The messages by peer; nobody got two."""
    answers = {whom: decode(frame) for whom, frame in replies}
    assert len(answers) == len(replies)
    return answers


def peer(member: int, job: str = "job") -> bytes:
    return f"{job} {member}".encode()


def codes(answers: Answers) -> dict[bytes, str]:
    """What went wrong for whom; everybody got a failure."""
    assert all(isinstance(answer, Failure) for answer in answers.values())
    return {whom: answer.code for whom, answer in answers.items()}


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_group_opens_when_all_have_registered_and_everybody_is_told(play):
    assert {whom: (answer.missing, [*answer.present]) for whom, answer in play.join(1, 3).items()} == {
        peer(1): (2, [1])
    }
    assert {whom: (answer.missing, [*answer.present]) for whom, answer in play.join(0, 3).items()} == {
        peer(0): (1, [0, 1])
    }
    answers = play.join(2, 3)
    assert set(answers) == {peer(0), peer(1), peer(2)}
    assert {(answer.missing, answer.present) for answer in answers.values()} == {(0, Members.of(range(3)))}
    assert {(answer.server, answer.epoch) for answer in answers.values()} == {(SERVER, 0)}
    assert {answer.digest for answer in answers.values()} == {digest(session_of(member)) for member in range(3)}


def test_registering_again_asks_again(play):
    play.join(0)
    assert play.join(0, at=b"new peer")[b"new peer"].present == Members.of([0])
    answers = play.join(1)
    assert set(answers) == {b"new peer", peer(1)}


def test_everybody_gets_the_same_bytes_whatever_the_order_of_arrival(play):
    play.open(4)
    frames = set()
    for step, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]):
        for member in order:
            brought = rows((1e16, 1.0, -1e16, 1.0)[member])
            sent = encode(contribution(member, brought, key(step=step)))
            replies = play.dispatcher.receive(play.now, peer(member), sent).replies
        assert {whom for whom, _ in replies} == {peer(member) for member in range(4)}
        (frame,) = {frame for _, frame in replies}
        frames.add(decode(frame).values.tobytes())
    assert frames == {np.array([((1e16 + 1.0) - 1e16) + 1.0]).tobytes()}


def test_two_jobs_with_the_same_layer_names_do_not_touch_each_other(play):
    for job in ("left", "right"):
        play.open(job=job)
    assert play.bring(0, 1.0, key(job="left")) == {}
    assert play.bring(0, 10.0, key(job="right")) == {}
    right = play.bring(1, 20.0, key(job="right"))
    assert {whom: answer.values.item() for whom, answer in right.items()} == {b"right 0": 30.0, b"right 1": 30.0}
    left = play.bring(1, 2.0, key(job="left"))
    assert {whom: answer.values.item() for whom, answer in left.items()} == {b"left 0": 3.0, b"left 1": 3.0}


def test_what_happens_to_one_job_is_nothing_to_another(play):
    for job in ("left", "right"):
        play.open(job=job)
        play.bring(0, 1.0, key(job=job))
    assert set(play.leave(1, "boom", job="left")) == {b"left 0"}
    assert set(play.bring(1, 2.0, key(job="right"))) == {b"right 0", b"right 1"}


def test_two_groups_of_one_job_do_not_touch_each_other(play):
    sessions = {"a": [b"a-000000", b"a-000001"], "b": [b"b-000000", b"b-000001"]}
    for group, tokens in sessions.items():
        for member, token in enumerate(tokens):
            play.say(register(member, group=group, session=token), token)
    for group, value in (("a", 1.0), ("b", 10.0)):
        play.say(contribution(0, value, key(group=group), sessions[group][0]), sessions[group][0])
    answers = play.say(contribution(1, 2.0, key(group="a"), sessions["a"][1]), sessions["a"][1])
    assert {whom: answer.values.item() for whom, answer in answers.items()} == dict.fromkeys(sessions["a"], 3.0)


def test_a_duplicate_member_is_refused_and_named(play):
    play.join(0, place="host 1")
    answers = play.join(0, at=b"second", session=STRANGER, place="host 2")
    assert codes(answers) == {b"second": "duplicate_member"}
    assert "host 1 is registered, host 2 was refused" in answers[b"second"].message
    assert codes(play.say(contribution(0, session=STRANGER), b"second")) == {b"second": "unknown_session"}
    assert play.join(1)[peer(0)].missing == 0


def test_a_session_cannot_be_two_members_of_a_group(play):
    """Or its leaving would leave the other one behind, and the group could never end."""
    play.join(0)
    assert codes(play.join(1, session=session_of(0), at=b"odd")) == {b"odd": "protocol"}
    assert play.report["groups"][0]["missing"] == 1
    play.leave(0)
    assert play.groups == []


@pytest.mark.parametrize("other", [{"job": "other"}, {"group": "other"}], ids=str)
def test_a_session_cannot_be_in_two_groups(play, other):
    play.join(0, 1)
    assert codes(play.join(0, 1, session=session_of(0), at=b"odd", **other)) == {b"odd": "protocol"}
    assert play.groups == [("job", "world", 0)]
    play.leave(0)
    assert play.groups == []


def test_members_that_disagree_on_how_many_they_are_are_told(play):
    play.join(0, 2)
    answers = play.join(1, 3)
    assert codes(answers) == {peer(1): "world_size"}
    assert answers[peer(1)].fields == {"job": "job", "group": "world", "member": 1, "expected": 2, "got": 3}
    assert play.join(1, 2)[peer(1)].missing == 0


@pytest.mark.parametrize("opened", [False, True])
def test_a_number_that_does_not_fit_the_world_is_refused_and_leaves_nothing_behind(play, opened):
    if opened:
        play.open(3, epoch=1)
    before = play.groups
    answers = play.join(3, 3, epoch=2)
    assert codes(answers) == {peer(3): "world_size"}
    assert "expected a number in [0, 3)" in answers[peer(3)].message
    assert answers[peer(3)].fields == {"job": "job", "group": "world", "member": 3, "expected": 3, "got": 4}
    assert play.groups == before


def test_members_of_any_number_form_a_group_and_one_more_is_refused(play):
    assert play.join(7, 2, group="pair")[peer(7)].present == Members.of([7])
    assert set(play.join(4, 2, group="pair")) == {peer(4), peer(7)}
    answers = play.join(5, 2, group="pair")
    assert codes(answers) == {peer(5): "world_size"}
    assert "expected 2 ranks, and [4, 7] are there, got one more from rank 5 (place 5)" in answers[peer(5)].message
    assert answers[peer(5)].fields == {"job": "job", "group": "pair", "member": 5, "expected": 2, "got": 3}
    play.bring(7, 1e16, key(group="pair"))
    assert play.bring(4, 1.0, key(group="pair"))[peer(7)].values.item() == 1.0 + 1e16


def test_a_group_does_not_wait_for_a_member_of_the_job_that_has_failed(play):
    """Whether the one that failed would have come is not known, but nobody shall wait to find out."""
    sessions = [b"in-pair0", b"in-pair1", b"in-late0"]
    play.open(3)
    play.join(0, 2, group="pair", session=sessions[0])
    play.leave(2, "RuntimeError: out of memory")
    for session, group in ((sessions[0], "pair"), (sessions[1], "pair"), (sessions[2], "late")):
        answers = play.join(0, 2, group=group, session=session, at=session)
        assert codes(answers) == {session: "replica_lost"}
        assert "rank 2 (place 2) failed with RuntimeError: out of memory" in answers[session].message


def test_whoever_waits_for_a_group_to_open_is_told_once_of_a_member_of_the_job_that_has_failed(play):
    """All others leave as well, and each answer too many may reach a socket that waits for something else by then."""
    play.open(3)
    play.join(0, 2, group="pair", session=b"in-pair0", at=b"pair 0")
    assert codes(play.leave(2, "boom")) == {b"pair 0": "replica_lost"}
    assert play.leave(1, "ReplicaLost: rank 2") == {}


def test_a_group_opens_although_a_member_of_the_job_has_ended(play):
    play.open(3)
    play.leave(2)
    play.join(0, 2, group="pair", session=b"in-pair0")
    assert play.join(1, 2, group="pair", session=b"in-pair1")[peer(1)].missing == 0


def test_an_open_group_goes_on_although_a_member_outside_of_it_has_failed(play):
    play.open(3)
    for member in (0, 1):
        play.join(member, 2, group="pair", session=b"in-pair%d" % member)
    play.leave(2, "boom")
    assert play.join(0, 2, group="pair", session=b"in-pair0")[peer(0)].missing == 0
    play.bring(0, 1.0, key(group="pair"), session=b"in-pair0")
    assert play.bring(1, 2.0, key(group="pair"), session=b"in-pair1")[peer(0)].values.item() == 3.0


def test_a_new_run_ends_all_groups_of_the_old_one_and_none_of_another_job(play):
    play.open(epoch=1)
    play.join(0, 2, group="pair", session=b"in-pair0", epoch=1)
    play.open(job="other")
    play.join(0, epoch=2, session=STRANGER)
    assert play.groups == [("other", "world", 0), ("job", "world", 2)]


def test_an_earlier_epoch_is_stale(play):
    play.open(epoch=4)
    answers = play.join(0, at=b"late", epoch=3, session=STRANGER, place="host 2")
    assert codes(answers) == {b"late": "stale_epoch"}
    assert "expected epoch 4 or later, got 3 from rank 0 (host 2)" in answers[b"late"].message
    assert answers[b"late"].fields == {"job": "job", "group": "world", "expected": 4, "got": 3}
    assert play.groups == [("job", "world", 4)]


def test_a_later_epoch_replaces_the_group_and_tells_who_waits(play):
    play.open(epoch=1)
    play.bring(0, 1.0, key(epoch=1))
    answers = play.join(1, at=b"new", epoch=2, session=STRANGER, place="host 2")
    failed = answers.pop(peer(0))
    assert (failed.code, failed.key) == ("refused", key(epoch=1))
    assert "a new run of the group was begun by rank 1 (host 2)" in failed.message
    assert {whom: (answer.epoch, answer.present) for whom, answer in answers.items()} == {b"new": (2, Members.of([1]))}
    assert play.groups == [("job", "world", 2)]
    assert codes(play.bring(0, 1.0, key(epoch=1))) == {peer(0): "refused"}


def test_the_same_sessions_may_begin_the_later_epoch(play):
    play.open(epoch=1)
    play.join(0, epoch=2)
    assert play.join(0, epoch=2)[peer(0)].missing == 1
    assert set(play.join(1, epoch=2)) == {peer(0), peer(1)}
    play.bring(0, 1.0, key(epoch=2))
    assert play.bring(1, 2.0, key(epoch=2))[peer(0)].values.item() == 3.0


def test_one_that_is_far_into_an_epoch_may_begin_the_next_at_its_first_step(play):
    play.open(epoch=1)
    for member in range(2):
        play.bring(member, 1.0, key(epoch=1, step=7))
    assert play.join(0, epoch=2)[peer(0)].epoch == 2
    assert set(play.join(1, epoch=2)) == {peer(0), peer(1)}


def test_one_that_is_far_into_an_epoch_is_told_that_it_cannot_be_another_member(play):
    play.open()
    play.bring(0, 1.0, key(step=7))
    answers = play.say(register(5, session=session_of(0)), peer(0))
    assert codes(answers) == {peer(0): "protocol"}


def test_leaving_an_open_group_tells_everybody_why(play):
    play.open(3)
    play.bring(0)
    answers = play.leave(2, "RuntimeError: out of memory")
    assert codes(answers) == {peer(0): "replica_lost"}
    assert "rank 2 (place 2) failed with RuntimeError: out of memory" in answers[peer(0)].message
    assert answers[peer(0)].key == KEY
    late = play.bring(1)
    assert (late[peer(1)].code, late[peer(1)].message) == ("replica_lost", answers[peer(0)].message)
    again = play.join(1, 3)
    assert (again[peer(1)].code, again[peer(1)].message) == ("replica_lost", answers[peer(0)].message)


def test_a_new_run_can_begin_under_the_name_of_a_broken_one(play):
    play.open()
    play.leave(1, "boom")
    new = [b"new-run0", b"new-run1"]
    assert play.join(1, session=new[1], at=new[1])[new[1]].present == Members.of([1])
    assert set(play.join(0, session=new[0], at=new[0])) == set(new)
    play.say(contribution(0, 1.0, session=new[0]), new[0])
    answers = play.say(contribution(1, 2.0, session=new[1]), new[1])
    assert {whom: answer.values.item() for whom, answer in answers.items()} == dict.fromkeys(new, 3.0)
    # The survivor of the broken run is not taken for the new run's member.
    for answers in (play.bring(0), play.join(0)):
        assert codes(answers) == {peer(0): "refused"}
        assert "a new run of the group was begun by rank 1 (place 1)" in answers[peer(0)].message


def test_a_new_run_may_have_another_number_of_members(play):
    play.open(2)
    play.leave(1, "boom")
    assert play.join(0, 1, session=STRANGER, at=b"new")[b"new"].missing == 0


def test_leaving_before_the_group_is_open_just_frees_the_place(play):
    play.join(0)
    assert play.leave(0) == {}
    play.join(1, session=STRANGER, at=b"one")
    assert play.join(0, session=b"a fresh1", at=b"zero")[b"one"].missing == 0


def test_who_has_left_is_told_so(play):
    play.open()
    play.leave(0)
    for answers in (play.bring(0), play.join(0)):
        assert codes(answers) == {peer(0): "refused"}
        assert "expected a new one, this one has left" in answers[peer(0)].message
    assert play.leave(0) == {}


def test_who_was_lost_is_told_so_when_it_registers_again_though_the_group_is_gone(play):
    play.open()
    for _ in range(8):
        play.now += limits.SILENCE_SECONDS / 7
        play.dispatcher.tick(play.now)
    assert play.groups == []
    for answers in (play.join(0), play.bring(0)):
        assert codes(answers) == {peer(0): "replica_lost"}
        assert answers[peer(0)].fields["member"] == 0


def test_a_replaced_session_is_refused_at_its_old_epoch_and_taken_in_at_a_later_one(play):
    play.open(epoch=1)
    play.leave(1, "boom")
    play.join(1, epoch=1, session=STRANGER, at=b"new")
    assert codes(play.join(0, epoch=1)) == {peer(0): "refused"}
    assert play.join(0, epoch=2)[peer(0)].missing == 1
    assert play.join(0, epoch=2)[peer(0)].missing == 1


def test_only_so_many_ended_sessions_are_remembered(play, monkeypatch):
    monkeypatch.setattr(ended, "REMEMBERED_SESSIONS", 2)
    for number in range(3):
        play.join(0, session=b"session%d" % number)
        play.say(Leave(b"session%d" % number, ""), peer(0))
    found = [play.bring(0, session=b"session%d" % number)[peer(0)].code for number in range(3)]
    assert found == ["unknown_session", "refused", "refused"]


def test_results_of_an_unknown_session_are_not_answered(play):
    """Many come at once, and every answer would bring all of them again, and so on without end."""
    result = Result(STRANGER, Aggregate(KEY, 1, 1, Members.of([0]), np.zeros((1, 1))))
    assert play.say(result, b"who") == {}


def test_nobody_is_told_of_a_step_that_no_message_can_name(play):
    """A stranger may claim to be in the last step there is."""
    play.join(0, 1, min_members=1, step=limits.MAX_COUNTER)
    assert play.join(1, 1, min_members=1)[peer(1)].first_step == limits.MAX_COUNTER


def test_the_last_one_out_removes_the_group(play):
    play.open()
    play.leave(0)
    assert play.groups == [("job", "world", 0)]
    play.leave(1)
    assert play.groups == []
    assert play.join(0, session=STRANGER)[peer(0)].present == Members.of([0])


def test_an_unknown_session_is_told_for_its_round(play):
    play.open()
    answers = play.say(contribution(0, session=STRANGER), b"who")
    assert codes(answers) == {b"who": "unknown_session"}
    assert answers[b"who"].key == KEY
    assert digest(STRANGER).hex() in answers[b"who"].message
    assert play.bring(0) == {}


@pytest.mark.parametrize("wrong", [{"job": "other"}, {"group": "other"}, {"epoch": 7}], ids=str)
def test_a_key_of_another_group_than_the_session_registered_for_is_refused(play, wrong):
    play.open()
    play.open(job="other")
    strange = key(**wrong)
    answers = play.say(contribution(0, 1.0, strange, session_of(0)), peer(0))
    assert codes(answers) == {peer(0): "protocol"}
    assert answers[peer(0)].key == strange
    assert all(group["waiting"] == [] for group in play.report["groups"])


def test_one_that_contributes_before_the_group_is_open_is_asked_who_it_is(play):
    play.join(1, 3)
    assert codes(play.bring(1)) == {peer(1): "unknown_session"}


def test_a_tick_ends_what_is_over_its_time(play):
    play.open(deadline=10.0)
    play.bring(1)
    assert play.dispatcher.tick(109.9) == []
    answers = read(play.dispatcher.tick(110.0))
    assert codes(answers) == {peer(1): "timeout"}
    assert (answers[peer(1)].fields["missing"], answers[peer(1)].fields["waiting"]) == ([0], [1])


def test_a_later_epoch_of_a_group_is_no_group_more(play):
    for number in range(limits.MAX_GROUPS):
        play.join(0, job=f"{number:05d}")
    answers = play.join(0, job="01023", epoch=1)
    assert isinstance(answers[peer(0, "01023")], Registered)
    assert len(answers) == 1


def test_stop_tells_who_waits_in_every_job(play):
    for job in ("left", "right"):
        play.open(job=job)
        play.bring(1, 1.0, key(job=job))
    answers = read(play.dispatcher.stop())
    assert codes(answers) == dict.fromkeys([b"left 1", b"right 1"], "master_stopped")
    assert play.dispatcher.stop() == []


def test_stop_tells_who_waits_for_a_group_to_open(play):
    play.join(0, 3)
    play.join(2, 3)
    answers = read(play.dispatcher.stop())
    assert codes(answers) == dict.fromkeys([peer(0), peer(2)], "master_stopped")
    told = answers[peer(0)]
    text = "the server was stopped before the group was open\n  in job 'job', group 'world'"
    assert (told.key, told.message) == (None, text)


def test_a_status_report_says_what_the_server_is_doing(play):
    play.open(place="host 1")
    play.bring(0, rows(1.0, 2.0))
    play.dispatcher.receive(play.now, b"", b"garbage")
    play.now += 2.5
    status = play.say(StatusRequest(), b"anybody")[b"anybody"]
    assert isinstance(status, Status)
    assert status.report == {
        "server": SERVER.hex(),
        "seconds": 2.5,
        "received": 5,
        "bad_frames": 1,
        "over_limits": 0,
        "strangers": 0,
        "refused_connections": 0,
        "idle_connections": 0,
        "flooding_connections": 0,
        "claimed_routing_ids": 0,
        "dropped_answers": 0,
        "forged_results": 0,
        "dropped_messages": 0,
        "ended": [],
        "groups": [
            {
                "job": "job",
                "group": "world",
                "epoch": 0,
                "world_size": 2,
                "min_members": 0,
                "members": [
                    {"member": 0, "place": "host 1", "stand": "takes_part", "step": 0, "replicas": 2},
                    {"member": 1, "place": "host 1", "stand": "takes_part", "step": 0, "replicas": 0},
                ],
                "missing": 0,
                "lost": "",
                "rounds_done": 0,
                "rounds_failed": 0,
                "kept_bytes": GROUP_BYTES + 2 * MEMBER_BYTES + ROUND_BYTES + 2 * FUTURE_BYTES + CONTRIBUTION_BYTES + 16,
                "waiting": [{"round": str(KEY), "seconds": 2.5, "missing": [1]}],
            }
        ],
    }


def test_the_step_of_a_member_is_the_one_it_last_spoke_of(play):
    play.join(0, step=7)
    play.join(1, step=8)
    assert [member["step"] for member in play.report["groups"][0]["members"]] == [7, 8]
    play.bring(1, key=key(step=12))
    assert [member["step"] for member in play.report["groups"][0]["members"]] == [7, 12]


def test_one_group_that_is_too_large_to_tell_of_is_left_out(play, monkeypatch):
    play.open(4, place="h" * 200)
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 500)
    report = play.say(StatusRequest(), b"anybody")[b"anybody"].report
    assert (report["groups"], report["left_out"]) == ([], 1)


def test_a_server_that_is_full_still_says_what_it_is_doing(play):
    """As many groups of four as limits.py speaks of; their places are host names as long as DNS has them."""
    groups = limits.MAX_GROUPS * 7 // 8  # the rest is kept for jobs that are at work
    for number in range(groups):
        for member in range(4):
            play.join(member, 4, job=f"{number:05d}", place="h" * 253)
    answer = play.say(StatusRequest(), b"anybody")[b"anybody"]
    assert isinstance(answer, Status)
    assert play.dispatcher.bad_frames == 0
    told = answer.report["groups"]
    assert len(told) == groups
    assert all(len(group["members"]) + group.get("members_left_out", 0) == 4 for group in told)
    assert "members_left_out" in told[0], "not all fits"


@pytest.mark.parametrize(
    "answer",
    [
        Registered(b"session0", SERVER, 0, 0, 0, NOBODY),
        Aggregate(KEY, 1, 1, NOBODY, np.zeros((1, 1))),
        Failure("mismatch", "no", {}),
        Status({}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_only_a_server_sends_is_refused(play, answer):
    answers = play.say(answer, b"odd")
    assert codes(answers) == {b"odd": "protocol"}
    assert f"expected a request, got {type(answer).__name__}" in answers[b"odd"].message
    assert play.dispatcher.bad_frames == 1


def test_garbage_is_counted_and_answered_and_nobody_else_notices(play):
    play.open()
    play.bring(0)
    for garbage in (b"", b"GET / HTTP/1.1", encode(StatusRequest())[:-1], b"SBN\x04" + bytes(4)):
        answers = read(play.dispatcher.receive(play.now, b"stranger", garbage).replies)
        assert codes(answers) == {b"stranger": "protocol"}
    assert (play.dispatcher.received, play.dispatcher.bad_frames) == (7, 4)
    assert set(play.bring(1)) == {peer(0), peer(1)}


def test_another_protocol_version_is_answered_by_name(play):
    frame = bytearray(encode(register()))
    frame[3] = 5
    (answer,) = read(play.dispatcher.receive(play.now, b"new", bytes(frame)).replies).values()
    assert (answer.code, answer.fields) == ("version", {"expected": 4, "got": 5})
    assert play.dispatcher.bad_frames == 1


def test_a_deeply_nested_frame_costs_its_sender_an_error_and_nobody_else_anything(play):
    """1 kB that msgpack unpacks and Python cannot print."""
    play.open()
    header = b"\x91" * 1000 + b"\xc0"
    frame = b"SBN\x04" + len(header).to_bytes(4, "little") + header
    assert codes(read(play.dispatcher.receive(play.now, b"stranger", frame).replies)) == {b"stranger": "protocol"}
    assert play.bring(0) == {}


SOUND = [
    encode(message)
    for message in (
        register(0),
        register(1),
        register(0, epoch=1),
        contribution(0),
        contribution(1),
        contribution(1, rows(1.0, 2.0, channels=2)),
        Leave(session_of(1), "boom"),
        StatusRequest(),
    )
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A frame that the dispatcher knows, with some bytes changed, cut or doubled."""
    frame = bytearray(draw(st.sampled_from(SOUND)))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=4)):
        frame[place % len(frame)] = value
    end = draw(st.integers(0, 2 * len(frame)))
    return bytes(frame if draw(st.booleans()) else (frame + frame)[:end])


frames = st.one_of(mutated(), st.binary(max_size=100), st.sampled_from(SOUND), messages.map(encode))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), frames), max_size=12))
def test_whatever_comes_in_never_raises_and_every_answer_is_sound(received):
    play = Play()
    play.open(3, job="fuzz")
    play.bring(0, 1.0, key(job="fuzz"))
    for at, frame in received:
        for whom, answer in play.dispatcher.receive(play.now, at, frame).replies:
            assert isinstance(whom, bytes)
            assert isinstance(decode(answer), (Registered, Aggregate, Failure, Status, Pending))
        play.now += 200.0
        for _, answer in play.dispatcher.tick(play.now):
            decode(answer)
    # Whatever that was: the server still reports, and takes a new job and reduces a round of it.
    assert isinstance(play.say(StatusRequest(), b"x")[b"x"], Status)
    play.open(job="fine")
    play.bring(0, 1.0, key(job="fine"))
    assert play.bring(1, 2.0, key(job="fine"))[b"fine 0"].values.item() == 3.0


@settings(deadline=None)
@given(st.lists(st.integers(0, 11), max_size=40))
def test_members_in_any_disorder_get_each_round_once_and_alike(events):
    """Registrations, contributions, repetitions and departures, interleaved in any way."""
    play = Play()
    results: dict[RoundKey, set[bytes]] = {}
    for event in events:
        member, what = event % 3, event // 3
        message = {
            0: register(member, 3),
            1: contribution(member, float(member)),
            2: contribution(member, float(member), key(call=1)),
            3: Leave(session_of(member), "boom"),
        }[what]
        for _, frame in play.dispatcher.receive(play.now, peer(member), encode(message)).replies:
            answer = decode(frame)
            if isinstance(answer, Aggregate):
                assert (answer.replicas, answer.values) == (3, 3.0)
                results.setdefault(answer.key, set()).add(frame)
    assert all(len(frames) == 1 for frames in results.values())


def test_a_registration_that_comes_late_is_not_answered():
    """The member waits for a round by then, and would take a refusal for the answer."""
    world = PureWorld(2)
    one, other = world.members
    late = one.session.register()
    for _ in range(2):
        for member in world.members:
            member.forward(1.0)
        for member in world.members:
            member.backward(1.0)
    world.send(other, other.session.leave(""))
    one.answers.clear()
    world.send(one, late)
    assert one.answers == []
    world.send(one, one.session.register())
    assert one.latest(ReplicaLost).fields["member"] == 1


# After a restart, while a member is still to come.

BEFORE = {"server": b"server-9", "step": 1, "known": Members.of(range(3))}
LATE = key(step=1)


@pytest.fixture
def returning(play) -> Play:
    """Two of three members have come back, and wait for the third."""
    for member in range(2):
        play.join(member, 3, **BEFORE)
    return play


def kept_bytes(play: Play) -> int:
    (group,) = play.report["groups"]
    return group["kept_bytes"]


def test_what_is_sent_again_is_kept_once_and_answered_where_it_was_sent_last(returning):
    returning.bring(0, 1.0, LATE)
    once = kept_bytes(returning)
    for attempt in range(1, 9):
        returning.say(replace(contribution(0, 1.0, LATE), attempt=attempt), b"socket %d" % attempt)
    assert kept_bytes(returning) == once
    returning.bring(1, 2.0, LATE)
    returning.join(2, 3, **BEFORE)
    answers = returning.bring(2, 3.0, LATE)
    assert set(answers) == {b"socket 8", peer(1), peer(2)}
    assert answers[b"socket 8"].values.item() == 6.0


def test_other_rows_for_a_round_that_waits_are_refused_and_the_first_count(returning):
    returning.bring(0, 1.0, LATE)
    assert codes(returning.bring(0, 5.0, LATE)) == {peer(0): "conflict"}
    returning.bring(1, 2.0, LATE)
    returning.join(2, 3, **BEFORE)
    assert returning.bring(2, 3.0, LATE)[peer(0)].values.item() == 6.0


def test_a_member_with_many_rounds_takes_no_room_from_another(returning):
    for call in range(limits.MAX_OPEN_ROUNDS):
        assert returning.bring(0, 1.0, key(step=1, call=call)) == {}
    assert codes(returning.bring(0, 1.0, key(step=1, call=limits.MAX_OPEN_ROUNDS))) == {peer(0): "limit"}
    assert returning.bring(1, 1.0, LATE) == {}


def test_results_that_were_not_announced_are_not_kept(play):
    play.join(0, 3, **BEFORE, results=1)

    def tell(layer: str) -> int:
        told = Aggregate(key(layer, step=1), 1, 1, Members.of(range(3)), np.zeros((1, 1)))
        assert play.say(Result(session_of(0), told), peer(0)) == {}
        return kept_bytes(play)

    assert 0 < tell("bn") == tell("bn") == tell("another")


def test_who_is_there_is_told_where_a_member_registered_last_not_where_it_contributes(returning):
    returning.say(contribution(0, 1.0, LATE), b"another socket")
    told = returning.join(2, 3, **BEFORE)
    assert isinstance(told[peer(0)], Registered)


def test_the_dispatcher_says_what_became_of_a_frame(play):
    def became(message):
        frame = message if isinstance(message, bytes) else encode(message)
        received = play.dispatcher.receive(play.now, b"peer", frame)
        return received.session, received.is_refused, received.is_unsound

    session = session_of(0)
    accepted = (session, False, False)
    assert became(register(0, 1)) == accepted
    assert became(contribution(0)) == accepted
    assert became(Heartbeat(session)) == accepted
    assert became(StatusRequest()) == (b"", False, False)
    assert became(b"garbage") == (b"", True, True)
    assert became(register(1, 1, session=session)) == (b"", True, True), "one session, two members"
    assert became(register(0, 2, session=session_of(5))) == (b"", True, False), "another size of the group"
    assert became(Heartbeat(session_of(7))) == (b"", True, False), "no such session"
    assert became(Leave(session, "")) == (b"", False, False), "it has just left"
    assert became(contribution(0)) == (b"", True, False)
