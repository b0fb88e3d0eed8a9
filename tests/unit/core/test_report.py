"""The status report: it fits into a message, however many groups there are, and is cheap when requested often."""

from typing import Any

import pytest

from server.core import report
from server.core.dispatcher import Dispatcher
from server.core.report import CACHE_SECONDS, MAX_MISSING, MAX_ROUNDS
from server.security.access import Principal
from server.view.text import describe
from statsd_bn import limits
from statsd_bn.messages import Status, StatusRequest
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register

ALICE = Principal("alice", "key of alice", ("a-*",))
BOB = Principal("bob", "key of bob", ("b-*",))


class Play:
    def __init__(self) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(b"server-0", 0.0)

    def begin(self, job: str, members: int, **given: Any) -> None:
        for member in range(members):
            session = b"%-4.4s%04x" % (job.encode(), member)
            self.send(register(member, members, job=job, session=session, **given))

    def send(self, message: Any, **given: Any) -> list[bytes]:
        return [frame for _, frame in self.dispatcher.receive(self.now, b"peer", encode(message), **given).replies]

    def ask(self, **given: Any) -> dict[str, Any]:
        (frame,) = self.send(StatusRequest(), **given)
        answer = decode(frame)
        assert isinstance(answer, Status)
        return answer.report


def test_a_large_group_does_not_hide_the_others():
    play = Play()
    play.begin("large", 6000, place="h" * 250)
    for number in range(20):
        play.begin(f"s{number:02d}", 2)
    status = play.ask()
    assert "left_out" not in status
    large, *small = status["groups"]
    assert [len(group["members"]) for group in small] == [2] * 20
    assert len(large["members"]) + large["members_left_out"] == 6000
    assert len(large["members"]) > 1000, "all that fits is reported"
    assert "6000 of 6000 ranks" in describe(status)
    assert f"and {large['members_left_out']} more ranks" in describe(status)


def test_many_rounds_and_their_missing_members_are_shortened():
    play = Play()
    play.begin("job", 200)
    for step in range(MAX_ROUNDS + 5):
        play.send(contribution(0, key=key(step=step), session=b"job 0000"))
    (group,) = play.ask()["groups"]
    assert [round_["round"] for round_ in group["waiting"]] == [str(key(step=step)) for step in range(MAX_ROUNDS)]
    assert group["waiting_left_out"] == 5
    assert group["waiting"][0]["missing"] == list(range(1, 1 + MAX_MISSING))
    assert group["waiting"][0]["missing_left_out"] == 199 - MAX_MISSING
    play.now += 2.0
    text = describe(play.ask())
    assert f"and {199 - MAX_MISSING} more: forward of bn, step 0" in text.replace("\n    ", " ")
    assert "and 5 more rounds" in text


def test_a_shortened_report_of_a_waiting_group_reads_as_text(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 3000)
    play = Play()
    for member in range(90):
        play.send(register(member, 100, session=b"job %04x" % member))
    assert "Waiting for 10 ranks to join: 90 of 100 ranks are here" in describe(play.ask())


@pytest.mark.parametrize("room", [1300, 1500, 3000, 6000, 20_000, 100_000])
def test_a_report_never_takes_more_than_a_message_holds(room, monkeypatch):
    play = Play()
    for number in range(20):
        job = f"{number:03d} " + "𝄞" * 60
        play.begin(job, 7, place="𝄞" * 60, epoch=limits.MAX_COUNTER, step=limits.MAX_COUNTER)
        play.send(contribution(0, key=key(job=job, epoch=limits.MAX_COUNTER), session=b"%-4.4s0000" % job.encode()))
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", room)
    status = play.ask()
    assert len(status["groups"]) + status.get("left_out", 0) == 20
    assert (room < 1500) == (status["groups"] == [])


def test_a_long_report_is_built_once_in_a_while_for_each_tenant(monkeypatch):
    play = Play()
    play.begin("a-large", 4000)
    play.begin("b-large", 4000)
    built: list[int] = []
    groups = report.group_entries
    monkeypatch.setattr(report, "group_entries", lambda *given: built.append(1) or groups(*given))
    for _ in range(20):
        assert [group["job"] for group in play.ask(principal=ALICE)["groups"]] == ["a-large"]
        assert [group["job"] for group in play.ask(principal=BOB)["groups"]] == ["b-large"]
    assert len(built) == 2
    play.now += CACHE_SECONDS
    assert play.ask(principal=ALICE)["seconds"] == CACHE_SECONDS
    assert len(built) == 3


def test_only_a_tenant_that_asks_too_often_gets_counts_without_groups(monkeypatch):
    monkeypatch.setattr(report, "BURST_BYTES", 2**14)
    monkeypatch.setattr(report, "BYTES_PER_SECOND", 2**12)
    play = Play()
    play.begin("a-job", 100)
    play.begin("b-job", 100)
    statuses = [play.ask(principal=ALICE) for _ in range(100)]
    whole = [one for one in statuses if one["groups"]]
    assert 2 <= len(whole) < 10
    assert statuses[-1]["received"] == 300
    assert all(one["left_out"] == 1 for one in statuses if not one["groups"])
    assert "1 more groups" in describe(statuses[-1])
    assert play.ask(principal=BOB)["groups"]
    play.now += 4.0
    assert play.ask(principal=ALICE)["groups"], "the tenant has waited"


def test_a_short_report_is_always_current():
    play = Play()
    assert [play.ask()["received"] for _ in range(3)] == [1, 2, 3]
