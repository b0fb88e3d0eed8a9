"""Round times and lateness of members: counted cumulatively and reported once a second."""

import pytest

from client.session.protocol.heartbeats import HeartbeatScheduler
from client.session.protocol.member import Member
from client.session.protocol.session import Session
from statsd_bn.members import Members
from statsd_bn.messages import LatenessReport, Registered, RoundTrips, digest
from statsd_bn.timing import MAX_FREQUENT, REPEAT_INTERVALS, SECONDS, DurationReporter
from statsd_bn.wire import decode, encode


def a_session():
    session = Session(b"session0", Member("job", "world", 0, 0, 2, 60.0, "place 0"))
    session.on_unsolicited(encode(Registered(digest(session.member_token), b"server00", 0, 0, 0, Members.of([0, 1]))))
    return session


def counts(frames, kind=RoundTrips):
    (report,) = map(decode, frames)
    assert isinstance(report, kind)
    return report.session, report.microseconds, [count for count in report.counts if count]


def test_each_report_covers_all_rounds():
    session = a_session()
    assert session.timing_frames(0.0) == []
    for _ in range(3):
        session.times.add(30e-6)
    assert counts(session.timing_frames(1.0)) == (b"session0", 90, [3])
    session.times.add(1e-3)
    assert session.timing_frames(1.0 + SECONDS / 2) == []
    assert counts(session.timing_frames(1.0 + SECONDS)) == (b"session0", 1090, [3, 1])
    assert session.timing_frames(9.0) == [], "there is no news"
    # Repeated: the last frame may have been lost, or the server may have been restarted.
    assert counts(session.timing_frames(1.0 + (1 + REPEAT_INTERVALS) * SECONDS)) == (b"session0", 1090, [3, 1])
    assert session.timing_frames(2.0 + (1 + REPEAT_INTERVALS) * SECONDS) == []


def test_each_report_includes_delays():
    session = a_session()
    session.lateness.add(30e-6)
    assert counts(session.timing_frames(1.0), LatenessReport) == (b"session0", 30, [1])
    session.times.add(1e-3)
    session.lateness.add(50e-6)
    trips, late = session.timing_frames(1.0 + SECONDS)
    assert counts([trips]) == (b"session0", 1000, [1])
    assert counts([late], LatenessReport) == (b"session0", 80, [1, 1])


@pytest.mark.parametrize(("members", "pause"), [(2, SECONDS), (MAX_FREQUENT, SECONDS), (8 * MAX_FREQUENT, 8 * SECONDS)])
def test_members_of_a_large_group_report_less_often(members, pause):
    times = DurationReporter(members)
    times.add(1e-3)
    times.collect()
    assert times.is_due(0.0)
    times.report(0.0)
    times.add(1e-3)
    times.collect()
    assert [times.is_due(pause * part) for part in (0.5, 0.99, 1.0)] == [False, False, True]


def test_reports_follow_a_heartbeat():
    scheduler, session = HeartbeatScheduler(), a_session()
    session.times.add(1e-3)
    assert scheduler.timing_frames(1.0, [session]) == []
    scheduler.sessions_due(1e9, [session])
    scheduler.mark_sent(session)
    assert len(scheduler.timing_frames(2.0, [session])) == 1
