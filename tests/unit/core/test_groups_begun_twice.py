"""Members of an open group register with a restarted server that begins the same group with other members."""

import pytest

from client.session.protocol.member import Member
from client.session.protocol.session import Session
from integration.test_restart import World, rows_of
from server.group.recovery import RECONNECT_SECONDS
from statsd_bn import limits
from statsd_bn.errors import DuplicateMember, UnknownSession
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Failure, Registered, digest
from statsd_bn.wire import decode, encode


def newcomer(number, *, n, min_members=0):
    return Session(b"%8d" % number, Member("job", "world", 0, number, n, 60.0, f"newcomer {number}", min_members))


def answers(world, session):
    return [decode(frame) for frame in world.inboxes.pop(session.member_token, [])]


@pytest.fixture
def late():
    """A world, and a member that registers with a new server before it hears that the old one had opened the group."""
    world = World()
    session = newcomer(2, n=3)
    world.restart(b"server-1")
    world.send(session, session.register())
    opened = Registered(digest(session.member_token), b"server-0", 0, 0, 0, Members.of(range(3)))
    assert answers(world, session)[-1].missing == 2
    session.on_unsolicited(encode(opened))
    return world, session


def contribute(world, session, key):
    """Run a round trip until the new server answers the repeated contribution."""
    world.send(session, session.contribution(key, rows_of(session.member.rank)))
    (frame,) = world.inboxes.pop(session.member_token)
    with pytest.raises(UnknownSession):
        session.answer(key, frame)
    world.send(session, *session.resync_frames(), session.contribution(key, rows_of(session.member.rank), 1))
    return answers(world, session)


def test_a_member_of_an_open_group_makes_a_filling_group_recover_and_learns_who_is_missing(late):
    world, session = late
    key = session.forward_key("bn")
    messages = contribute(world, session, key)
    assert not any(isinstance(answer, Failure) for answer in messages), "the server does not ask again and again"
    world.now += limits.SILENCE_SECONDS
    world.deliver(world.dispatcher.tick(world.now))
    (failure,) = answers(world, session)
    assert (failure.code, failure.fields["member"]) == ("replica_lost", 0)
    assert "ranks 0-1 did not reconnect" in failure.message


def test_a_member_of_an_open_group_participates_once_the_others_are_back(late):
    world, session = late
    key = session.forward_key("bn")
    contribute(world, session, key)
    for other in world.members[:2]:
        contribution = other.contribution(other.forward_key("bn"), rows_of(other.member.rank))
        world.send(other, *other.resync_frames(), contribution)
    (aggregate,) = [answer for answer in answers(world, session) if isinstance(answer, Aggregate)]
    assert list(aggregate.members) == [0, 1, 2]


def begin_anew(world):
    """Two newcomers register first with a new server: one with a former member's number, and one with a new number."""
    world.restart(b"server-1")
    world.members = [newcomer(1, n=2, min_members=1), newcomer(3, n=2, min_members=1)]
    for session in world.members:
        world.send(session, session.register())
    for session in world.members:
        world.read(session)


def test_members_of_a_group_that_was_begun_twice_get_an_error_and_not_the_others_result():
    """Newcomers have begun an elastic group anew, and a member of the former group reaches the third server first."""
    world = World(n=2, min_members=1)
    world.exchange("bn")
    left_out = world.members[1]
    waiting_for = left_out.forward_key("bn2")
    begin_anew(world)
    world.exchange("bn")
    world.exchange("bn2")
    world.restart(b"server-2")
    for session in (left_out, world.members[1]):
        world.send(session, *session.resync_frames())
    world.send(left_out, left_out.contribution(waiting_for, rows_of(1)))
    for _ in range(3):
        world.now += limits.SILENCE_SECONDS / 2
        world.heartbeats(left_out, world.members[1])
        world.deliver(world.dispatcher.tick(world.now))
    assert_conflict(answers(world, left_out))


def assert_conflict(messages):
    assert not [answer for answer in messages if isinstance(answer, Aggregate)]
    assert [answer.code for answer in messages if isinstance(answer, Failure)] == ["conflict"]


def test_incompatible_results_prove_that_a_group_was_begun_twice():
    """The results are of different rounds, but members of one group cannot have both results in the same step."""
    world = World(n=2, min_members=1)
    world.exchange("bn3")
    before = world.members[0]
    begin_anew(world)
    world.exchange("bn")
    double, _ = world.members
    key = double.forward_key("bn3")
    world.restart(b"server-2")
    for session in (before, *world.members):
        world.send(session, *session.resync_frames())
    world.send(double, double.contribution(key, rows_of(1)))
    go_on(world)
    assert_conflict(answers(world, double))


def live_on(world):
    end = world.now + 2 * limits.SILENCE_SECONDS
    while world.now < end:
        world.now += 0.5
        world.heartbeats(*world.members)
        world.deliver(world.dispatcher.tick(world.now))


def test_results_of_a_step_that_lost_a_member_prove_nothing():
    world = World(n=3, min_members=1)
    world.exchange("bn")
    world.members.pop()
    live_on(world)
    world.exchange("bn2")
    world.restart(b"server-1")
    for session in world.members:
        world.send(session, *session.resync_frames())
    live_on(world)
    for session in world.members:
        world.read(session)
    world.exchange("bn3")


def listen(world, session):
    for frame in world.inboxes.pop(session.member_token, []):
        world.send(session, *session.on_unsolicited(frame))


def go_on(world):
    world.now += RECONNECT_SECONDS
    world.deliver(world.dispatcher.tick(world.now))


def test_a_displaced_member_gets_no_sum_with_the_rows_of_its_successor():
    """A newcomer with the member's number finished the round at the second server; the third gets the result."""
    world = World(n=2, min_members=1)
    stays, displaced = world.members
    key, _ = [session.forward_key("bn") for session in world.members]
    world.restart(b"server-1")
    double = newcomer(1, n=2, min_members=1)
    world.send(double, double.register())
    for session in (stays, displaced):
        world.send(session, *session.resync_frames())
    listen(world, displaced)
    go_on(world)
    for session in (stays, double):
        world.read(session)
    world.send(double, double.contribution(double.forward_key("bn"), rows_of(1, 7.0)))
    world.send(stays, stays.contribution(key, rows_of(0)))
    world.take(stays, key)
    world.restart(b"server-2")
    world.heartbeats(displaced)
    listen(world, displaced)
    world.send(stays, *stays.resync_frames())
    go_on(world)
    world.send(displaced, displaced.contribution(key, rows_of(1)))
    with pytest.raises(DuplicateMember, match="newcomer 1 is registered, place 1 was refused"):
        [displaced.answer(key, frame) for frame in world.inboxes.pop(displaced.member_token)]
