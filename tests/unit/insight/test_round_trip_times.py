"""How long rounds took: counted beside the rounds, and told once a second, all of them each time."""

import pytest

from client.conversation.member import Member
from client.conversation.pulse import Pulse
from client.conversation.session import Session
from statsd_bn.members import Members
from statsd_bn.messages import Registered, RoundTrips
from statsd_bn.timing.round_trip_times import MOST_TOLD, SECONDS, RoundTripTimes
from statsd_bn.tokens import digest
from statsd_bn.wire import decode, encode


def a_session():
    session = Session(b"session0", Member("job", "world", 0, 0, 2, 60.0, "place 0"))
    session.overhear(encode(Registered(digest(session.token), b"server00", 0, 0, 0, Members.of([0, 1]))))
    return session


def counts(frame):
    told = decode(frame)
    assert isinstance(told, RoundTrips)
    return told.session, told.microseconds, [count for count in told.counts if count]


def test_all_rounds_are_told_again_each_time():
    session = a_session()
    assert session.round_trips(0.0) is None
    for _ in range(3):
        session.times.add(30e-6)
    assert counts(session.round_trips(1.0)) == (b"session0", 90, [3])
    session.times.add(1e-3)
    assert session.round_trips(1.0 + SECONDS / 2) is None
    assert counts(session.round_trips(1.0 + SECONDS)) == (b"session0", 1090, [3, 1])
    assert session.round_trips(9.0) is None, "there is no news"


@pytest.mark.parametrize(("members", "pause"), [(2, SECONDS), (MOST_TOLD, SECONDS), (8 * MOST_TOLD, 8 * SECONDS)])
def test_in_a_large_group_each_tells_less_often(members, pause):
    times = RoundTripTimes(members)
    times.add(1e-3)
    times.count()
    assert times.is_due(0.0)
    times.tell(0.0)
    times.add(1e-3)
    times.count()
    assert [times.is_due(pause * part) for part in (0.5, 0.99, 1.0)] == [False, False, True]


def test_they_go_only_where_a_heartbeat_has_gone_before():
    pulse, session = Pulse(), a_session()
    session.times.add(1e-3)
    assert pulse.round_trips(1.0, [session]) == []
    pulse.due(1e9, [session])
    pulse.sent(session)
    assert len(pulse.round_trips(2.0, [session])) == 1
