"""Limits: each refuses excess, counts it, and leaves the other tenants alone."""

import dataclasses
import re
from typing import Any

import pytest

from server.config import from_arguments, parser
from server.core.dispatcher import Dispatcher
from server.security.access import ANONYMOUS
from server.security.quota import (
    CONTRIBUTION_BYTES,
    EXPECTED_BYTES,
    FUTURE_BYTES,
    GROUP_BYTES,
    MEMBER_BYTES,
    ROUND_BYTES,
    MemoryShare,
    Quota,
    option_range,
)
from server.view.text import describe
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from statsd_bn.members import Members
from statsd_bn.messages import Failure, Heartbeat, Leave, Message, Result, StatusRequest
from statsd_bn.text import unwrap
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register, session_of

OPTIONS = dataclasses.fields(Quota)
every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


class Play:
    def __init__(self, **quota: float) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(b"server-0", 0.0, quota=Quota(**quota))

    def send(self, *messages: Message) -> list[Any]:
        replies: Any = []
        for message in messages:
            peer = getattr(message, "session", b"anybody")
            self.received = self.dispatcher.receive(self.now, peer, encode(message))
            replies = self.received.replies
        return [decode(frame) for _, frame in replies]

    def open(self, n: int = 2, **given: Any) -> None:
        for member in range(n):
            self.send(register(member, n, **given))

    @property
    def kept_bytes(self) -> list[int]:
        return [group["kept_bytes"] for group in self.dispatcher.report(self.now)["groups"]]

    def is_refused(self, *messages: Message) -> bool:
        before = self.dispatcher.counters.over_limits
        (answer, *_) = self.send(*messages) or [None]
        refused = isinstance(answer, Failure) and answer.code == "limit"
        assert (self.dispatcher.counters.over_limits > before) == refused, "only refusals are counted"
        if refused:
            assert str(answer.fields["limit"]) in answer.message
        return refused


# Options.


def test_without_options_the_protocols_limits_hold():
    assert from_arguments([], {}).quota == Quota()
    quota = Quota()
    assert (quota.max_members, quota.max_groups) == (limits.MAX_MEMBERS, limits.MAX_GROUPS)
    assert 10 * limits.MAX_FRAME_BYTES <= quota.max_tenant_bytes < quota.max_server_bytes


@every_option
def test_every_limit_is_a_flag_and_a_variable(option):
    value = option.metadata["least"] + 1
    flag, twin = f"--{option.name.replace('_', '-')}", f"STATSD_BN_{option.name.upper()}"
    assert getattr(from_arguments([flag, str(value)], {}).quota, option.name) == value
    assert getattr(from_arguments([], {twin: str(value)}).quota, option.name) == value
    assert getattr(from_arguments([flag, str(value)], {twin: "nonsense"}).quota, option.name) == value
    text = parser({}).format_help()
    assert flag in text
    assert twin in text


@every_option
def test_no_limit_is_above_what_the_protocol_allows_or_below_what_makes_sense(option):
    least, most = option.metadata["least"], option.metadata["most"]
    for sound in (least, most):
        Quota(**{option.name: sound})
    for unsound in (least - 1, most + 1, 0, -1):
        with pytest.raises(ConfigurationError, match=f"{option.name.replace('_', '-')}: expected"):
            Quota(**{option.name: unsound})


def test_a_limit_other_than_a_number_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        from_arguments(["--max-members", "many"], {})
    assert caught.value.code == 2
    assert "argument --max-members: expected 1 to 16384, got 'many'" in capsys.readouterr().err


# As floats these are infinite or overflow; Python refuses to convert the last to an int.
HUGE = {"400 digits": "9" * 400, "-400 digits": f"-{'9' * 400}", "5000 digits": "9" * 5000}


def error_of(call, capsys):
    with pytest.raises((ConfigurationError, SystemExit)) as caught:
        call()
    return capsys.readouterr().err if caught.type is SystemExit else caught.value.message


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
@every_option
def test_a_huge_number_is_refused_in_one_line(option, text, capsys):
    name = option.name.replace("_", "-")
    for call in (
        lambda: from_arguments([f"--{name}={text}"], {}),
        lambda: from_arguments([], {f"STATSD_BN_{option.name.upper()}": text}),
        lambda: Quota(**{option.name: type(option.default)(text) if len(text) < 1000 else 10**5000}),
    ):
        error = unwrap(error_of(call, capsys))
        assert name in error.replace("_", "-").lower()
        assert f"expected {option_range(option)}, got" in error
        assert len(error) < 250


@pytest.mark.parametrize("text", [*HUGE.values(), "0", str(2**31)], ids=[*HUGE, "0", "2**31"])
def test_the_parent_must_be_the_id_of_a_process(text, capsys):
    error = unwrap(error_of(lambda: from_arguments([f"--parent={text}"], {}), capsys))
    assert re.search(r"parent: expected the id of a process, 1 to 2147483647, got '?-?\d", error)
    assert len(error) < 250


# Refusals in the pure dispatcher; values just within a limit are accepted.


@pytest.mark.parametrize(
    ("quota", "within", "beyond"),
    [
        ({"max_members": 2}, register(0, 2), register(0, 3, job="other")),
        ({"max_members": 2}, register(1, 1, min_members=1), register(2, 1, min_members=1, job="other")),
        ({"max_groups": 1}, register(0), register(0, job="other")),
        ({"max_groups": 1}, register(0), register(0, group="other", session=b"session9")),
    ],
)
def test_a_registration_beyond_a_limit_is_refused(quota, within, beyond):
    play = Play(**quota)
    assert not play.is_refused(within)
    assert play.is_refused(beyond)
    assert len(play.kept_bytes) == 1


def test_a_contribution_beyond_the_open_rounds_is_refused_and_the_round_stays_open(monkeypatch):
    monkeypatch.setattr(limits, "MAX_OPEN_ROUNDS", 1)
    play, within = Play(), contribution(0)
    play.open()
    assert not play.is_refused(within)
    assert play.is_refused(contribution(0, key=key(step=1)))
    answers = play.send(dataclasses.replace(within, session=session_of(1)))
    assert {answer.key for answer in answers} == {within.key}
    assert {type(answer).__name__ for answer in answers} == {"Aggregate"}


SIZE = 8 + CONTRIBUTION_BYTES
ROUND = ROUND_BYTES + 2 * FUTURE_BYTES
PAIR = GROUP_BYTES + 2 * MEMBER_BYTES


def test_a_job_keeps_no_more_bytes_than_it_may():
    play = Play(max_tenant_bytes=PAIR + 2 * (ROUND + SIZE))
    play.open()
    assert not play.is_refused(contribution(0, key=key(step=0)))
    assert not play.is_refused(contribution(0, key=key(step=1)))
    assert play.kept_bytes == [PAIR + 2 * (ROUND + SIZE)]
    assert play.is_refused(contribution(0, key=key(step=2)))
    # Nothing was stored and no round opened; the earlier contribution may be repeated.
    assert play.kept_bytes == [PAIR + 2 * (ROUND + SIZE)]
    assert len(play.dispatcher.report(0.0)["groups"][0]["waiting"]) == 2
    assert not play.is_refused(contribution(0, key=key(step=1)))


def test_another_members_contribution_counts_as_well():
    play = Play(max_tenant_bytes=PAIR + MEMBER_BYTES + ROUND + FUTURE_BYTES + 2 * SIZE)
    play.open(3)
    assert not play.is_refused(contribution(0))
    assert not play.is_refused(contribution(1))
    assert play.is_refused(contribution(2))


def test_all_groups_of_a_job_count_together_and_other_jobs_do_not():
    play = Play(max_tenant_bytes=2 * PAIR + ROUND + SIZE)
    play.open()
    play.open(job="other")
    for member in (0, 1):
        play.send(register(member, group="pair", session=b"pair---%d" % member))
    assert not play.is_refused(contribution(0))
    assert play.is_refused(contribution(0, key=key(group="pair"), session=b"pair---0"))
    assert not play.is_refused(contribution(0, key=key(job="other"), session=session_of(0, "other")))


def test_a_long_run_keeps_the_same_number_of_bytes():
    play = Play()
    play.open()
    kept_bytes = []
    for step in range(3 * limits.CACHED_ROUNDS):
        play.send(contribution(0, key=key(step=step)), contribution(1, key=key(step=step)))
        kept_bytes += play.kept_bytes
    assert len(set(kept_bytes[limits.CACHED_ROUNDS :])) == 1
    assert kept_bytes[0] > 2 * SIZE


@pytest.mark.parametrize(
    "ends",
    [
        [Leave(session_of(0), ""), Leave(session_of(1), "")],
        [register(0, epoch=1, session=b"session9"), Leave(b"session9", "")],
    ],
    ids=["left", "replaced"],
)
def test_a_job_that_ends_frees_all_room(ends):
    play = Play()
    play.open()
    play.send(contribution(0), contribution(1), contribution(0, key=key(step=1)))
    usage = play.dispatcher._usage
    assert usage.allocated_by_tenant["job 'job'"] > 3 * SIZE
    play.send(*ends)
    assert play.kept_bytes == []
    assert (usage.allocated, usage.allocated_by_tenant) == (0, {})


PAST = {"server": b"server-9", "known": Members.of([0, 1]), "results": 1}


def test_contributions_parked_after_a_restart_count_and_are_freed():
    aggregate = play_aggregate()
    back = Play()
    back.send(register(0, **PAST), Result(session_of(0), aggregate))
    results = back.kept_bytes[0]
    assert results > GROUP_BYTES + MEMBER_BYTES + 2 * EXPECTED_BYTES + CONTRIBUTION_BYTES
    play = Play(max_tenant_bytes=results + SIZE)
    play.send(register(0, **PAST), Result(session_of(0), aggregate))
    assert not play.is_refused(contribution(0, key=key(step=1)))
    assert play.kept_bytes == [results + SIZE]
    assert play.is_refused(contribution(0, key=key(step=2)))
    play.send(Leave(session_of(0), ""))
    assert play.dispatcher._usage.allocated == 0


def test_a_lost_member_of_a_full_account_frees_exactly_its_parked_contributions():
    play = Play()
    for member in (0, 1):
        known = {**PAST, "known": Members.of([0, 1, 2]), "results": 0}
        play.send(register(member, 3, min_members=1, **known))
        assert not play.is_refused(contribution(member, key=key(step=1)))
    usage = play.dispatcher._usage
    before, full = usage.allocated, MemoryShare(usage, "job 'job'")
    full.adjust(usage.quota.max_tenant_bytes)
    play.send(Leave(session_of(1), "it failed"))
    full.release_all()
    assert usage.allocated == before - SIZE - MEMBER_BYTES - EXPECTED_BYTES


def test_a_member_that_names_too_many_members_is_refused():
    play = Play(max_tenant_bytes=GROUP_BYTES + 2 * MEMBER_BYTES + 100 * EXPECTED_BYTES)
    assert play.is_refused(register(0, **{**PAST, "known": Members.of(range(10_000))}))
    assert not play.is_refused(register(0, **PAST))


def test_results_after_a_restart_count():
    play = Play(max_tenant_bytes=GROUP_BYTES + MEMBER_BYTES + 2 * EXPECTED_BYTES)
    play.send(register(0, **PAST))
    assert play.is_refused(Result(session_of(0), play_aggregate()))


def play_aggregate() -> Any:
    play = Play()
    play.open()
    return play.send(contribution(0), contribution(1))[0]


def test_the_report_counts_refusals():
    play = Play(max_members=1)
    assert "over a limit" not in describe(play.dispatcher.report(0.0, ANONYMOUS))
    play.send(register(0, 2))
    (answer,) = play.send(StatusRequest())
    assert answer.report["over_limits"] == 1
    assert "1 messages over a limit" in describe(answer.report)


def test_messages_of_strangers_are_counted_and_those_of_members_are_not():
    play = Play()
    messages = contribution(0), Heartbeat(session_of(0)), Result(session_of(0), play_aggregate())
    for number, message in enumerate(messages, start=1):
        play.send(message)
        assert play.received.is_refused
        assert play.dispatcher.counters.strangers == number
    # A returning member that has not sent its announced results yet is known.
    for message in (register(0, **PAST), Heartbeat(session_of(0)), contribution(0), StatusRequest()):
        play.send(message)
        assert not play.received.is_refused
    assert play.dispatcher.counters.strangers == 3
