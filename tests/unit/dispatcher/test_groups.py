"""Members of a group in the dispatcher: registrations, epochs, and departures."""

import sys

import numpy as np
import pytest

from server.core import registry
from server.core.dispatcher import Dispatcher
from statsd_bn import limits
from statsd_bn.errors import ReplicaLost
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Leave, Result, digest
from statsd_bn.wire import encode
from support.dispatcher_play import SERVER, Play, codes, peer
from support.pure_members import PureWorld
from support.strategies import KEY, contribution, key, register, session_of

STRANGER = b"stranger"


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_group_opens_for_all_once_all_have_registered(play):
    assert {peer_id: (answer.missing, [*answer.present]) for peer_id, answer in play.join(1, 3).items()} == {
        peer(1): (2, [1])
    }
    assert {peer_id: (answer.missing, [*answer.present]) for peer_id, answer in play.join(0, 3).items()} == {
        peer(0): (1, [0, 1])
    }
    answers = play.join(2, 3)
    assert set(answers) == {peer(0), peer(1), peer(2)}
    assert {(answer.missing, answer.present) for answer in answers.values()} == {(0, Members.of(range(3)))}
    assert {(answer.server, answer.epoch) for answer in answers.values()} == {(SERVER, 0)}
    assert {answer.digest for answer in answers.values()} == {digest(session_of(member)) for member in range(3)}


def test_a_repeated_registration_is_answered_at_its_new_address(play):
    play.join(0)
    assert play.join(0, at=b"new peer")[b"new peer"].present == Members.of([0])
    answers = play.join(1)
    assert set(answers) == {b"new peer", peer(1)}


def test_a_duplicate_member_is_refused_and_named(play):
    play.join(0, place="host 1")
    answers = play.join(0, at=b"second", session=STRANGER, place="host 2")
    assert codes(answers) == {b"second": "duplicate_member"}
    assert "there is a rank 0 already: host 1 is registered, host 2 was refused" in answers[b"second"].message
    assert answers[b"second"].fields == {"job": "job", "group": "world", "member": 0, "place": "host 1"}
    assert codes(play.send(contribution(0, session=STRANGER), b"second")) == {b"second": "unknown_session"}
    assert play.join(1)[peer(0)].missing == 0


def test_a_session_cannot_be_two_members_of_a_group(play):
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


def test_members_with_different_world_sizes_get_an_error(play):
    play.join(0, 2)
    answers = play.join(1, 3)
    assert codes(answers) == {peer(1): "world_size"}
    assert answers[peer(1)].fields == {"job": "job", "group": "world", "member": 1, "expected": 2, "got": 3}
    assert play.join(1, 2)[peer(1)].missing == 0


@pytest.mark.parametrize("opened", [False, True])
def test_a_rank_beyond_the_world_is_refused_without_a_trace(play, opened):
    if opened:
        play.open(3, epoch=1)
    before = play.groups
    answers = play.join(3, 3, epoch=2)
    assert codes(answers) == {peer(3): "world_size"}
    assert "expected a rank in [0, 3)" in answers[peer(3)].message
    assert answers[peer(3)].fields == {"job": "job", "group": "world", "member": 3, "expected": 3, "got": 4}
    assert play.groups == before


def test_members_with_any_ranks_form_a_group_and_one_more_is_refused(play):
    assert play.join(7, 2, group="pair")[peer(7)].present == Members.of([7])
    assert set(play.join(4, 2, group="pair")) == {peer(4), peer(7)}
    answers = play.join(5, 2, group="pair")
    assert codes(answers) == {peer(5): "world_size"}
    assert "expected 2 ranks, and ranks 4, 7 registered, got one more from rank 5 (place 5)" in answers[peer(5)].message
    assert answers[peer(5)].fields == {"job": "job", "group": "pair", "member": 5, "expected": 2, "got": 3}
    play.contribute(7, 1e16, key(group="pair"))
    assert play.contribute(4, 1.0, key(group="pair"))[peer(7)].values.item() == 1.0 + 1e16


def test_a_group_does_not_wait_for_a_member_of_the_job_that_has_failed(play):
    sessions = [b"in-pair0", b"in-pair1", b"in-late0"]
    play.open(3)
    play.join(0, 2, group="pair", session=sessions[0])
    play.leave(2, "RuntimeError: out of memory")
    for session, group in ((sessions[0], "pair"), (sessions[1], "pair"), (sessions[2], "late")):
        answers = play.join(0, 2, group=group, session=session, at=session)
        assert codes(answers) == {session: "replica_lost"}
        assert "rank 2 (place 2) failed with RuntimeError: out of memory" in answers[session].message


def test_members_that_wait_for_a_group_learn_once_of_a_failed_member_of_the_job(play):
    play.open(3)
    play.join(0, 2, group="pair", session=b"in-pair0", at=b"pair 0")
    assert codes(play.leave(2, "boom")) == {b"pair 0": "replica_lost"}
    assert play.leave(1, "ReplicaLost: rank 2") == {}


def test_a_group_opens_although_a_member_of_the_job_has_ended(play):
    play.open(3)
    play.leave(2)
    play.join(0, 2, group="pair", session=b"in-pair0")
    assert play.join(1, 2, group="pair", session=b"in-pair1")[peer(1)].missing == 0


def test_an_open_group_continues_although_a_member_outside_of_it_has_failed(play):
    play.open(3)
    for member in (0, 1):
        play.join(member, 2, group="pair", session=b"in-pair%d" % member)
    play.leave(2, "boom")
    assert play.join(0, 2, group="pair", session=b"in-pair0")[peer(0)].missing == 0
    play.contribute(0, 1.0, key(group="pair"), session=b"in-pair0")
    assert play.contribute(1, 2.0, key(group="pair"), session=b"in-pair1")[peer(0)].values.item() == 3.0


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


def test_a_later_epoch_replaces_the_group_and_ends_waiting_members(play):
    play.open(epoch=1)
    play.contribute(0, 1.0, key(epoch=1))
    answers = play.join(1, at=b"new", epoch=2, session=STRANGER, place="host 2")
    failed = answers.pop(peer(0))
    assert (failed.code, failed.key) == ("refused", key(epoch=1))
    assert "rank 1 (host 2) began a new run of the group" in failed.message
    assert {peer_id: (one.epoch, one.present) for peer_id, one in answers.items()} == {b"new": (2, Members.of([1]))}
    assert play.groups == [("job", "world", 2)]
    assert codes(play.contribute(0, 1.0, key(epoch=1))) == {peer(0): "refused"}


def test_the_same_sessions_may_begin_the_later_epoch(play):
    play.open(epoch=1)
    play.join(0, epoch=2)
    assert play.join(0, epoch=2)[peer(0)].missing == 1
    assert set(play.join(1, epoch=2)) == {peer(0), peer(1)}
    play.contribute(0, 1.0, key(epoch=2))
    assert play.contribute(1, 2.0, key(epoch=2))[peer(0)].values.item() == 3.0


def test_a_member_far_into_an_epoch_cannot_become_another_member(play):
    play.open()
    play.contribute(0, 1.0, key(step=7))
    answers = play.send(register(5, session=session_of(0)), peer(0))
    assert codes(answers) == {peer(0): "protocol"}


def test_leaving_an_open_group_sends_the_reason_to_all(play):
    play.open(3)
    play.contribute(0)
    answers = play.leave(2, "RuntimeError: out of memory")
    assert codes(answers) == {peer(0): "replica_lost"}
    assert "rank 2 (place 2) failed with RuntimeError: out of memory" in answers[peer(0)].message
    assert answers[peer(0)].key == KEY
    late = play.contribute(1)
    assert (late[peer(1)].code, late[peer(1)].message) == ("replica_lost", answers[peer(0)].message)
    again = play.join(1, 3)
    assert (again[peer(1)].code, again[peer(1)].message) == ("replica_lost", answers[peer(0)].message)


def test_a_new_run_can_begin_under_the_name_of_a_broken_one(play):
    play.open()
    play.leave(1, "boom")
    new = [b"new-run0", b"new-run1"]
    assert play.join(1, session=new[1], at=new[1])[new[1]].present == Members.of([1])
    assert set(play.join(0, session=new[0], at=new[0])) == set(new)
    play.send(contribution(0, 1.0, session=new[0]), new[0])
    answers = play.send(contribution(1, 2.0, session=new[1]), new[1])
    assert {peer_id: answer.values.item() for peer_id, answer in answers.items()} == dict.fromkeys(new, 3.0)
    # The survivor of the broken run is not taken for the new run's member.
    for answers in (play.contribute(0), play.join(0)):
        assert codes(answers) == {peer(0): "refused"}
        assert "rank 1 (place 1) began a new run of the group" in answers[peer(0)].message


def test_leaving_before_the_group_is_open_just_frees_the_rank(play):
    play.join(0)
    assert play.leave(0) == {}
    play.join(1, session=STRANGER, at=b"one")
    assert play.join(0, session=b"a fresh1", at=b"zero")[b"one"].missing == 0


def test_a_member_that_left_gets_an_error(play):
    play.open()
    play.leave(0)
    for answers in (play.contribute(0), play.join(0)):
        assert codes(answers) == {peer(0): "refused"}
        assert "has left; register with a new one" in answers[peer(0)].message
    assert play.leave(0) == {}


def test_a_lost_member_that_registers_again_gets_the_error_after_the_group_ended(play):
    play.open()
    for _ in range(8):
        play.now += limits.SILENCE_SECONDS / 7
        play.dispatcher.tick(play.now)
    assert play.groups == []
    for answers in (play.join(0), play.contribute(0)):
        assert codes(answers) == {peer(0): "replica_lost"}
        assert answers[peer(0)].fields["member"] == 0


def test_a_replaced_session_is_refused_at_its_old_epoch_and_accepted_at_a_later_one(play):
    play.open(epoch=1)
    play.leave(1, "boom")
    play.join(1, epoch=1, session=STRANGER, at=b"new")
    assert codes(play.join(0, epoch=1)) == {peer(0): "refused"}
    assert play.join(0, epoch=2)[peer(0)].missing == 1
    assert play.join(0, epoch=2)[peer(0)].missing == 1


def test_a_bounded_number_of_ended_sessions_is_remembered(play, monkeypatch):
    monkeypatch.setattr(registry, "REMEMBERED_SESSIONS", 2)
    for number in range(3):
        play.join(0, session=b"session%d" % number)
        play.send(Leave(b"session%d" % number, ""), peer(0))
    found = [play.contribute(0, session=b"session%d" % number)[peer(0)].code for number in range(3)]
    assert found == ["unknown_session", "refused", "refused"]


def test_results_of_an_unknown_session_are_not_answered(play):
    result = Result(STRANGER, Aggregate(KEY, 1, 1, Members.of([0]), np.zeros((1, 1))))
    assert play.send(result, b"who") == {}


def test_a_step_beyond_the_message_field_is_not_reported(play):
    play.join(0, 1, min_members=1, step=limits.MAX_COUNTER)
    assert play.join(1, 1, min_members=1)[peer(1)].first_step == limits.MAX_COUNTER


def test_the_last_leaving_member_removes_the_group(play):
    play.open()
    play.leave(0)
    assert play.groups == [("job", "world", 0)]
    play.leave(1)
    assert play.groups == []
    assert play.join(0, session=STRANGER)[peer(0)].present == Members.of([0])


def test_a_registration_that_comes_late_is_not_answered():
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


def calls_of(action) -> int:
    """The number of calls and of resumed generators, which is the same on any machine."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("steps", [0, 3], ids=["a new run", "after a restart of the server"])
def test_each_member_is_registered_with_as_much_work_as_in_a_small_group(steps):
    def work(members: int) -> int:
        world = Dispatcher(b"server-0", 0.0)
        frames = [encode(register(member, world_size=members, step=steps)) for member in range(members)]
        for frame in frames[: members // 2]:
            world.receive(0.0, b"peer", frame)
        return calls_of(lambda: world.receive(0.0, b"peer", frames[members // 2]))

    assert work(900) <= 1.1 * work(30)
