"""Each answer of the server, and each request without an answer, gives a snapshot."""

import pytest

from server.view.feed import Feed
from statsd_bn.errors import ServerUnreachable
from support.view_reports import group, member, report


def feed_of(*answers):
    left = iter(answers)

    def ask():
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Feed("tcp://127.0.0.1:4555", ask)


def test_a_silent_server_is_shown_with_its_last_report():
    feed = feed_of(report(group(member(0))), ServerUnreachable("nobody there"), report(group(member(0))))
    assert feed.refresh()["error"] == ""
    silent = feed.refresh()
    assert (silent["error"], len(silent["groups"])) == ("nobody there", 1)
    assert feed.refresh()["error"] == ""
    assert [event["kind"] for event in feed.snapshot["events"]][-2:] == ["silent", "answers"]


def test_a_restart_is_one_event_and_the_remedy_is_no_part_of_an_event():
    error = ServerUnreachable("no server listens at ipc://s; Is `python -m server` running there?")
    feed = feed_of(report(), error, report(server="efgh"))
    feed.refresh()
    assert feed.refresh()["verdict"]["advice"].startswith("Is `python -m server` running there? Ranks wait for ")
    feed.refresh()
    texts = [event["text"] for event in feed.snapshot["events"]]
    assert texts == ["The server does not answer: no server listens at ipc://s", "The server restarted"]


def test_a_server_that_has_never_answered_is_an_error():
    with pytest.raises(ServerUnreachable, match="nobody there"):
        feed_of(ServerUnreachable("nobody there")).refresh()


def test_a_reader_of_the_feed_gets_each_new_snapshot():
    feed = feed_of(report(), report(group(member(0))))
    feed.refresh()
    number, first = feed.next(0, 0.0)
    assert (number, first["groups"]) == (1, [])
    assert feed.next(number, 0.0)[0] == number
    feed.refresh()
    number, second = feed.next(number, 0.0)
    assert (number, len(second["groups"])) == (2, 1)


def test_a_stopped_feed_releases_its_readers():
    feed = feed_of(report())
    feed.refresh()
    feed.stop()
    assert feed.stopped
    assert feed.next(1, 60.0)[0] == 1


def test_an_invalid_report_is_an_error_of_the_server():
    feed = feed_of(report(group(member(0))), {"server": "abcd"}, report(group(member(0))))
    feed.refresh()
    assert "malformed one: KeyError" in feed.refresh()["error"]
    assert feed.refresh()["error"] == ""
    with pytest.raises(ServerUnreachable, match="malformed"):
        feed_of({"server": "abcd"}).refresh()


def test_a_server_with_invalid_reports_is_reported_once():
    feed = feed_of(report(group(member(0))), *[{"server": "abcd"}] * 20)
    for _ in range(20):
        feed.refresh()
    assert feed.snapshot["counts"] == {"silent": 1}


def test_an_unexpected_error_is_shown_and_the_feed_continues():
    feed = feed_of(report(group(member(0))), OSError("no descriptor left"), report(group(member(0))))
    feed.refresh()
    assert feed.refresh()["error"] == "OSError: no descriptor left"
    assert feed.refresh()["error"] == ""
