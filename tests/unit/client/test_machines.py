"""The client's state machines, without I/O: the frames, deadlines and results of round trips and registrations."""

import numpy as np
import pytest

from client.session.protocol.member import Member
from client.session.protocol.registration import ANSWER_SECONDS, DUPLICATE_SECONDS, RETRY_SECONDS, Registration
from client.session.protocol.round_trip import GRACE_SECONDS, MAX_RETRY_SECONDS, WARN_SECONDS, RoundTrip
from client.session.protocol.session import LastRoundDone, Session
from statsd_bn.errors import DuplicateMember, GroupIncomplete, MasterStopped, RoundTimeout, ServerUnreachable
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Aggregate, Contribution, Failure, Pending, Register, Registered, digest
from statsd_bn.reduction import Rows
from statsd_bn.wire import decode, encode

TOKEN = b"session0"
BEGAN = 100.0
DEADLINE = 30.0


@pytest.fixture
def session():
    return Session(TOKEN, Member("job", "world", 0, 0, 2, DEADLINE, "here"))


@pytest.fixture
def trip(session):
    key, rows = session.forward_key("bn"), Rows((1,), np.ones((1, 2, 1)))
    return RoundTrip(session, "memory://", key, rows, chance=lambda: 0.5)


@pytest.fixture
def registration(session):
    return Registration(session, "memory://", DEADLINE)


def registered(missing=0):
    return encode(Registered(digest(TOKEN), b"server-0", 0, 0, missing, NO_MEMBERS))


def sent(frames):
    return [decode(frame) for frame in frames]


def test_a_round_trip_sends_its_rows_and_ends_with_the_aggregate(trip):
    (first,), due, result = trip.begin(BEGAN)
    contribution = decode(first)
    assert (type(contribution), contribution.attempt, due, result) == (Contribution, 0, BEGAN + 1.0, None)
    answer = Aggregate(contribution.key, 2, 2, Members.of(range(2)), np.ones((2, 1)))
    frames, _, result = trip.step(BEGAN + 0.1, encode(answer))
    assert not frames
    assert result.key == answer.key


def test_a_round_trip_asks_again_less_and_less_often_and_counts_the_attempts(trip):
    _, due, _ = trip.begin(BEGAN)
    attempts, pauses = [], []
    for _ in range(4):
        now = due
        (frame,), due, _ = trip.step(now, None)
        attempts.append(decode(frame).attempt)
        pauses.append(due - now)
    assert attempts == [1, 2, 3, 4]
    assert pauses == pytest.approx([2.0, 3.0, 3.0, 3.0])


def test_news_of_a_wait_does_not_prolong_the_deadline(trip):
    (first,), *_ = trip.begin(BEGAN)
    pending = encode(Pending(decode(first).key, 3, "waiting for members [1]"))
    for seconds in range(1, int(DEADLINE + GRACE_SECONDS)):
        assert trip.step(BEGAN + seconds, pending)[2] is None
    with pytest.raises(RoundTimeout, match="last report: waiting for members"):
        trip.step(BEGAN + DEADLINE + GRACE_SECONDS, None)


def test_a_long_wait_is_reported_at_doubling_intervals(trip, caplog):
    (first,), *_ = trip.begin(BEGAN)
    key = decode(first).key
    with caplog.at_level("WARNING", "statsd_bn.client"):
        for seconds in range(1, 31):
            trip.step(BEGAN + seconds, encode(Pending(key, seconds, f"waiting, {seconds} s")))
    assert [record.getMessage() for record in caplog.records] == ["waiting, 10 s", "waiting, 20 s"]


def test_a_round_trip_gives_up_early_if_no_other_server_can_start(trip):
    _, due, _ = trip.begin(BEGAN)
    trip.is_gone = lambda: True
    while due < BEGAN + WARN_SECONDS:
        _, due, _ = trip.step(due, None)
    assert due <= BEGAN + WARN_SECONDS + MAX_RETRY_SECONDS
    with pytest.raises(MasterStopped, match="because the process that started it has ended"):
        trip.step(due, None)


def test_a_member_introduces_itself_to_a_restarted_master_and_asks_again(trip):
    trip.begin(BEGAN)
    frames, _, result = trip.step(BEGAN + 1.0, encode(Failure("unknown_session", "who?", {})))
    register, contribution = sent(frames)
    assert (type(register), contribution.attempt, result) == (Register, 1, None)


def test_the_last_round_done_message_precedes_each_contribution_until_an_answer(trip, session):
    settled = session.round_done(session.forward_key("before"))
    frames, due, _ = trip.begin(BEGAN)
    assert frames[0] == settled
    again, *_ = trip.step(due, None)
    assert again[0] == settled
    first, second = (decode(one[1]) for one in (frames, again))
    assert (first.attempt, second.attempt) == (0, 1)
    trip.step(due + 0.1, encode(Aggregate(first.key, 2, 2, Members.of(range(2)), np.ones((2, 1)))))
    key, rows = session.forward_key("bn"), Rows((1,), np.ones((1, 2, 1)))
    later = RoundTrip(session, "memory://", key, rows)
    assert [type(message) for message in sent(later.begin(BEGAN)[0])] == [Contribution]


def test_acknowledging_an_earlier_round_done_message_keeps_the_later_one(session):
    earlier, later = (session.round_done(session.forward_key(layer)) for layer in ("one", "two"))
    session.last_round_done.acknowledge(earlier)
    assert session.last_round_done.frame == later


def test_a_session_sends_the_last_round_done_message_of_another_session_of_its_process():
    last = LastRoundDone()
    world, pair = (
        Session(token, Member("job", group, 0, 0, 2, DEADLINE, "here"), last)
        for token, group in ((TOKEN, "world"), (b"session1", "pair"))
    )
    settled = pair.round_done(pair.forward_key("bn"))
    key, rows = world.forward_key("bn"), Rows((1,), np.ones((1, 2, 1)))
    frames, *_ = RoundTrip(world, "memory://", key, rows).begin(BEGAN)
    assert frames[0] == settled


def test_a_registration_asks_again_until_a_long_silence(registration):
    frames, due, _ = registration.begin(BEGAN)
    for _ in range(int(ANSWER_SECONDS / RETRY_SECONDS) - 1):
        assert [type(message) for message in sent(frames)] == [Register]
        frames, due, _ = registration.step(due, None)
    assert due == BEGAN + ANSWER_SECONDS
    with pytest.raises(ServerUnreachable):
        registration.step(due, None)


def test_a_registration_waits_for_the_others_and_ends_when_the_group_is_open(registration):
    registration.begin(BEGAN)
    frames, due, result = registration.step(BEGAN + 0.1, registered(missing=1))
    assert (list(frames), due, result) == ([], BEGAN + 0.1 + ANSWER_SECONDS, None)
    (frame,), *_ = registration.step(due, None)
    assert isinstance(decode(frame), Register)
    assert registration.step(due + 1.0, registered())[2].missing == 0


def test_waiting_for_an_incomplete_group_ends_at_the_deadline(registration):
    registration.begin(BEGAN)
    registration.step(BEGAN + 0.1, registered(missing=1))
    with pytest.raises(GroupIncomplete):
        registration.step(BEGAN + DEADLINE, registered(missing=1))


def test_a_rank_that_is_still_taken_is_requested_again_for_a_short_time(registration):
    registration.begin(BEGAN)
    refusal = encode(Failure("duplicate_member", "taken", {}))
    frames, due, _ = registration.step(BEGAN + 0.1, refusal)
    assert not frames
    (frame,), *_ = registration.step(due, None)
    assert isinstance(decode(frame), Register)
    with pytest.raises(DuplicateMember):
        registration.step(BEGAN + DUPLICATE_SECONDS, refusal)
