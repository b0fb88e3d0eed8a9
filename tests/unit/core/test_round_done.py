"""RoundDone: the server drops rounds that a strict group has completed in shared memory, and sends no answer."""

import pytest

from statsd_bn.errors import ProtocolError, RoundFailed, RoundMismatch
from support.pure_members import PureMember, PureWorld

QUIET_SECONDS = 3.0


@pytest.fixture
def world():
    return PureWorld(2)


def settle(world: PureWorld, member: PureMember) -> None:
    world.send(member, member.session.round_done(member.key))


def report(world: PureWorld) -> dict:
    (group,) = world.dispatcher.report(world.now)["groups"]
    return group


def test_a_round_that_is_done_in_shared_memory_is_dropped_and_frees_its_memory(world):
    one, _ = world.members
    before = world.dispatcher._usage.allocated
    one.forward(1.0)
    assert world.dispatcher._usage.allocated > before
    assert len(report(world)["waiting"]) == 1
    settle(world, one)
    assert world.dispatcher._usage.allocated == before
    assert report(world)["waiting"] == []
    assert one.answers == []


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_member_that_continued_does_not_count_as_waiting(world, is_settled):
    """`asleep` still sleeps in a round that `ahead` has completed; `ahead` waits for `asleep` in the next round."""
    asleep, ahead = world.members
    asleep.forward(1.0)
    ahead.session.steps.record_phase(ahead.session.forward_key("bn").phase)
    if is_settled:
        world.send(ahead, ahead.session.round_done(asleep.key))
    ahead.forward(2.0, layer="next")
    world.pass_time(QUIET_SECONDS)
    errors = [answer for answer in ahead.answers if isinstance(answer, RoundMismatch)]
    assert bool(errors) is not is_settled


def test_a_late_copy_of_a_contribution_does_not_restart_a_round_that_is_done(world):
    one, _ = world.members
    one.forward(1.0)
    settle(world, one)
    one.ask_again()
    assert report(world)["waiting"] == []


def test_a_contribution_that_is_parked_after_a_restart_is_dropped_too(world):
    one, two = world.members
    one.forward(1.0)
    two.forward(2.0)
    world.restart()
    one.introduce()
    one.forward(3.0)
    held = world.dispatcher._usage.allocated
    settle(world, one)
    assert world.dispatcher._usage.allocated < held
    two.introduce()
    assert report(world)["waiting"] == []


def test_members_of_an_elastic_group_cannot_end_each_others_rounds():
    world = PureWorld(2, min_members=1)
    one, two = world.members
    one.forward(1.0)
    world.send(two, two.session.round_done(one.key))
    two.forward(2.0)
    assert one.total == ([0, 1], 3.0)


def test_a_stranger_cannot_report_a_round_as_done(world):
    one, two = world.members
    one.forward(1.0)
    two.session.member_token = b"stranger"
    world.send(two, two.session.round_done(one.key))
    assert len(report(world)["waiting"]) == 1


@pytest.mark.parametrize("foreign", [{"job": "another"}, {"group": "another"}, {"epoch": 1}])
def test_a_member_cannot_report_a_round_of_another_group_as_done(world, foreign):
    one, two = world.members
    one.forward(1.0)
    world.send(two, two.session.round_done(one.key._replace(**foreign)))
    assert [type(answer) for answer in two.answers] == [ProtocolError]
    assert world.dispatcher.bad_frames == 1
    assert len(report(world)["waiting"]) == 1


def test_a_member_whose_round_was_falsely_reported_as_done_gets_an_error_when_it_asks_again(world):
    one, two = world.members
    one.forward(1.0)
    world.send(two, two.session.round_done(one.key))
    one.ask_again()
    assert [type(answer) for answer in one.answers] == [RoundFailed]
