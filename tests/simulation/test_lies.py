"""A member that lies to a restarted server about what it was given decides nothing for the others."""

from dataclasses import replace

import numpy as np
import pytest

from integration.test_restart import World, rows_of
from simulation.simulated_liar import LIE, lie, with_a_lie
from statsd_bn import limits
from statsd_bn.error_text import in_log
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Result, StatusRequest
from statsd_bn.wire import decode, encode

EITHER_KEY = pytest.mark.parametrize("keeps_key", [True, False])
EVERYBODY = Members.of(range(3))


def restarted(**given):
    """A world whose members have had a round, and wait for another one that a new server does not know."""
    world = World(**given)
    world.exchange("bn")
    key, *_ = [session.forward_key("bn2") for session in world.members]
    world.restart(b"server-1")
    return world, key


def come_back(world, session, key, forged=b""):
    frames = session.introduction()
    world.say(session, *(with_a_lie(frames, forged) if forged else frames))
    world.say(session, session.contribution(key, rows_of(session.member.rank)))


def answers(world, session):
    return [decode(frame) for frame in world.inboxes.pop(session.token, [])]


def sums(world, session):
    return [answer.values[0, 0] for answer in answers(world, session) if isinstance(answer, Aggregate)]


def tally(world):
    (_, frame), *_ = world.dispatcher.receive(world.now, b"anybody", encode(StatusRequest())).replies
    return decode(frame).report["forged_results"]


@pytest.mark.parametrize(("keeps_key", "order"), [(True, (0, 1, 2)), (True, (2, 1, 0)), (False, (2, 1, 0))])
def test_where_all_rows_are_there_one_lie_decides_nothing(keeps_key, order, caplog):
    world, key = restarted(keeps_key=keeps_key)
    for number in order:
        session = world.members[number]
        come_back(world, session, key, lie(session.token, key, EVERYBODY, (2, 1)) if number == 2 else b"")
    assert [sums(world, session) for session in world.members] == [[6.0], [6.0], [6.0]]
    assert tally(world) == int(keeps_key)
    assert "it is ignored" in caplog.text, "the server's owner is told"


def test_a_member_without_rows_is_taken_at_its_word_by_a_server_with_a_new_key():
    """It might have been given the answer; and a member that brings such rows does the same harm."""
    world, key = restarted()
    liar = world.members[2]
    for session in world.members[:2]:
        come_back(world, session, key)
    world.say(liar, *with_a_lie(liar.introduction(), lie(liar.token, key, EVERYBODY, (2, 1))))
    assert [sums(world, session) for session in world.members[:2]] == [[LIE], [LIE]]


def test_a_lie_about_a_round_to_come_decides_nothing():
    world, key = restarted()
    liar = world.members[2]
    later = key._replace(layer="bn3")
    for session in world.members:
        come_back(world, session, key, lie(liar.token, later, EVERYBODY, (2, 1)) if session is liar else b"")
    for session in world.members:
        world.inboxes.pop(session.token)
    for session in reversed(world.members):
        world.say(session, session.contribution(later, rows_of(session.member.rank)))
    assert [sums(world, session) for session in world.members] == [[6.0], [6.0], [6.0]]


def test_a_lie_is_worth_nothing_where_the_server_knows_its_own_seals_though_the_liar_keeps_its_rows_back():
    world, key = restarted(keeps_key=True)
    liar = world.members[2]
    for session in world.members[:2]:
        come_back(world, session, key)
    world.say(liar, *with_a_lie(liar.introduction(), lie(liar.token, key, EVERYBODY, (2, 1))))
    assert [sums(world, session) for session in world.members[:2]] == [[], []]
    world.say(liar, liar.contribution(key, rows_of(2)))
    assert [sums(world, session) for session in world.members] == [[6.0], [6.0], [6.0]]


@EITHER_KEY
def test_a_liar_delays_nobody(keeps_key):
    """A result that is worth nothing has been told all the same."""
    world, key = restarted(keeps_key=keeps_key)
    liar = world.members[2]
    forged = lie(liar.token, key._replace(layer="never"), EVERYBODY, (2, 1))
    for session in world.members:
        come_back(world, session, key, forged if session is liar else b"")
    assert [sums(world, session) for session in world.members] == [[6.0], [6.0], [6.0]]


@pytest.mark.parametrize("covered", [[2], [0, 2]])
@EITHER_KEY
def test_one_member_does_not_evict_others_as_overtaken(covered, keeps_key):
    world, key = restarted(min_members=1, keeps_key=keeps_key)
    liar = world.members[2]
    forged = lie(liar.token, key._replace(step=key.step + 1), Members.of(covered), (2, 1))
    for session in world.members:
        come_back(world, session, key, forged if session is liar else b"")
    world.now += 1.0
    world.heartbeats(*world.members)
    world.deliver(world.dispatcher.tick(world.now))
    assert [sums(world, session) for session in world.members] == [[6.0], [6.0], [6.0]]


@EITHER_KEY
def test_a_member_that_the_others_had_gone_on_without_is_told_so(keeps_key):
    """Their results say so, in one voice."""
    world = World(min_members=1, keeps_key=keeps_key)
    world.exchange("bn")
    first, second, late = world.members
    key, *_ = [session.forward_key("bn2") for session in world.members]
    for world.now in np.arange(0.5, 1.5 + limits.SILENCE_SECONDS, 0.5):
        world.heartbeats(first, second)
        world.deliver(world.dispatcher.tick(world.now))
    for session in (first, second):
        world.inboxes.pop(session.token, None)
        world.say(session, session.contribution(key, rows_of(session.member.rank)))
    assert world.take(first, key) == world.take(second, key)
    world.restart(b"server-1")
    for session in (late, first, second):
        world.say(session, *session.introduction())
    world.say(late, late.contribution(key, rows_of(2)))
    world.now += 1.0
    world.heartbeats(*world.members)
    world.deliver(world.dispatcher.tick(world.now))
    world.inboxes.pop(late.token)
    world.heartbeats(late)
    (failure,) = answers(world, late)
    assert (failure.code, failure.fields["member"]) == ("replica_lost", 2)
    assert "the others had gone on without it before the server was restarted" in in_log(failure.message)


def test_what_only_one_member_says_of_a_round_without_others_breaks_a_group_whose_server_has_a_new_key():
    """It may be true or a lie; whoever believed it would throw honest members out, or let them wait for ever."""
    world, key = restarted(min_members=1)
    liar = world.members[2]
    world.say(liar, *with_a_lie(liar.introduction(), lie(liar.token, key, Members.of([2]), (2, 1))))
    for session in world.members[:2]:
        come_back(world, session, key)
    world.now += 1.0
    world.heartbeats(*world.members)
    world.deliver(world.dispatcher.tick(world.now))
    for session in world.members[:2]:
        failure = answers(world, session)[-1]
        assert (failure.code, failure.key, failure.fields["member"]) == ("conflict", key, 2)
        assert "was given an aggregate without ranks" in failure.message


def test_an_answer_that_covers_one_who_has_died_since_stays_what_it_was():
    """Member 0 was given it and has contributed again; the rows of member 2 are gone."""
    for keeps_key in (True, False):
        world = World(min_members=1, keeps_key=keeps_key)
        key, *_ = [session.forward_key("bn") for session in world.members]
        for number, session in enumerate(world.members):
            world.say(session, session.contribution(key, rows_of(number)))
        ahead, behind, _ = world.members
        expected = world.take(ahead, key)
        world.restart(b"server-1")
        come_back(world, ahead, key)
        come_back(world, behind, key)
        world.now = limits.SILENCE_SECONDS
        world.heartbeats(ahead, behind)
        world.deliver(world.dispatcher.tick(world.now))
        assert world.inboxes[ahead.token][-1] == world.inboxes[behind.token][-1] == expected


def test_no_result_counts_in_a_group_that_has_not_been_restarted():
    world = World()
    (frame, *_) = world.exchange("bn")
    other = replace(decode(frame), values=np.full((2, 1), LIE))
    liar = world.members[0]
    world.say(liar, encode(Result(liar.token, other)))
    world.exchange("bn2")


def test_what_members_have_told_is_forgotten_when_nobody_can_wait_for_it():
    world, key = restarted()
    for session in world.members:
        come_back(world, session, key)
    for session in world.members:
        answers(world, session)
    (master,) = world.dispatcher._registry.masters.values()
    assert len(master._claims.of) == 1
    for number in range(limits.KEPT_ROUNDS):
        assert len(master._claims.of) == int(number < limits.KEPT_ROUNDS - 1)
        world.exchange(f"next {number}")
    assert master._archive.remembers(key._replace(layer="bn"))
