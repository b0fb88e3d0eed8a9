"""Limits: each refuses what is beyond it, counts it, and leaves everybody else alone."""

import dataclasses
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from client.connection import Connection
from client.session import Member
from client.transport import ZmqTransport
from memory_members import wait_until
from server import Config, Service
from server.access import ANYBODY
from server.account import CONTRIBUTION_BYTES, FUTURE_BYTES, GROUP_BYTES, MEMBER_BYTES, NAMED_BYTES, ROUND_BYTES
from server.config import from_arguments, parser
from server.connections import Connections
from server.dispatcher import Dispatcher
from server.quota import Quota
from server.status import ask, describe
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, LimitExceeded
from statsd_bn.members import Members
from statsd_bn.messages import Failure, Heartbeat, Leave, Message, Result, StatusRequest
from statsd_bn.wire import decode, encode
from strategies import contribution, key, register, rows, session_of

ANY_PORT = "tcp://127.0.0.1:*"
WAIT_SECONDS = 30.0
OPTIONS = dataclasses.fields(Quota)
every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


class Play:
    """A dispatcher with a quota; each message comes from its session's own peer."""

    def __init__(self, **quota: float) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(b"server-0", 0.0, quota=Quota(**quota))

    def say(self, *messages: Message) -> list[Any]:
        replies: Any = []
        for message in messages:
            peer = getattr(message, "session", b"anybody")
            replies = self.dispatcher.receive(self.now, peer, encode(message))
        return [decode(frame) for _, frame in replies]

    def open(self, n: int = 2, **given: Any) -> None:
        for member in range(n):
            self.say(register(member, n, **given))

    @property
    def kept(self) -> list[int]:
        return [group["kept_bytes"] for group in self.dispatcher.report(self.now)["groups"]]

    def is_refused(self, *messages: Message) -> bool:
        before = self.dispatcher.tally.over_limits
        (answer, *_) = self.say(*messages) or [None]
        refused = isinstance(answer, Failure) and answer.code == "limit"
        assert (self.dispatcher.tally.over_limits > before) == refused, "what is refused is counted, and nothing else"
        if refused:
            assert str(answer.fields["limit"]) in answer.message
        return refused


# Options.


def test_without_options_the_protocols_limits_hold():
    """One that is not the protocol's must be generous, for nobody has asked for it."""
    assert from_arguments([], {}).quota == Quota()
    quota = Quota()
    assert (quota.max_frame_bytes, quota.max_name_bytes) == (limits.MAX_FRAME_BYTES, limits.MAX_NAME_BYTES)
    assert (quota.max_channels, quota.max_replicas) == (limits.MAX_CHANNELS, limits.MAX_REPLICAS)
    assert (quota.max_members, quota.max_groups) == (limits.MAX_MEMBERS, limits.MAX_GROUPS)
    assert quota.max_open_rounds == limits.MAX_OPEN_ROUNDS
    assert 10 * limits.MAX_FRAME_BYTES <= quota.max_tenant_bytes < quota.max_server_bytes


@every_option
def test_every_limit_is_a_flag_and_a_variable(option):
    value = option.metadata["least"] + 1
    flag, twin = f"--{option.name.replace('_', '-')}", f"STATSD_BN_{option.name.upper()}"
    assert getattr(from_arguments([flag, str(value)], {}).quota, option.name) == value
    assert getattr(from_arguments([], {twin: str(value)}).quota, option.name) == value
    assert getattr(from_arguments([flag, str(value)], {twin: "nonsense"}).quota, option.name) == value
    said = parser({}).format_help()
    assert flag in said
    assert twin in said


@every_option
def test_no_limit_is_above_what_the_protocol_allows_or_below_what_makes_sense(option):
    least, most = option.metadata["least"], option.metadata["most"]
    for sound in (least, most):
        Quota(**{option.name: sound})
    for unsound in (least - 1, most + 1, 0, -1):
        with pytest.raises(ConfigurationError, match=f"{option.name.replace('_', '-')}: expected"):
            Quota(**{option.name: unsound})


@every_option
def test_every_limit_has_a_reason(option):
    assert len(option.metadata["reason"]) > 15


def test_a_limit_that_is_no_number_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        from_arguments([], {"STATSD_BN_MAX_MEMBERS": "many"})
    assert caught.value.code == 2
    assert "invalid int value: 'many'" in capsys.readouterr().err


# What is refused, in the pure dispatcher. What is just within a limit is taken.


@pytest.mark.parametrize(
    ("quota", "within", "beyond"),
    [
        (
            {"max_name_bytes": 5},
            register(0, job="éxyz", session=b"session0"),
            register(1, job="éxyzz", session=b"session1"),
        ),
        ({"max_name_bytes": 5}, register(0, group="world"), register(1, group="worlds")),
        ({"max_members": 2}, register(0, 2), register(0, 3, job="other")),
        ({"max_members": 2}, register(1, 1, min_members=1), register(2, 1, min_members=1, job="other")),
        ({"max_jobs": 1}, register(0), register(0, job="other")),
        ({"max_groups": 1}, register(0), register(0, group="other", session=b"session9")),
    ],
)
def test_a_registration_beyond_a_limit_is_refused(quota, within, beyond):
    play = Play(**quota)
    assert not play.is_refused(within)
    assert play.is_refused(beyond)
    assert len(play.kept) == 1


def test_a_job_may_have_several_groups():
    play = Play(max_jobs=1)
    play.open()
    assert not play.is_refused(register(0, group="pair", session=b"session9"))


@pytest.mark.parametrize(
    ("quota", "within", "beyond"),
    [
        ({"max_channels": 3}, contribution(0, rows(1.0, channels=3)), contribution(1, rows(1.0, channels=4))),
        ({"max_replicas": 2}, contribution(0, rows(1.0, 1.0)), contribution(1, rows(1.0, 1.0, 1.0))),
        ({"max_name_bytes": 5}, contribution(0, key=key("layer")), contribution(1, key=key("layers"))),
        ({"max_open_rounds": 1}, contribution(0), contribution(0, key=key(step=1))),
        (
            {"max_frame_bytes": 1024},
            contribution(0, rows(1.0, channels=100)),
            contribution(1, rows(1.0, channels=130)),
        ),
    ],
)
def test_a_contribution_beyond_a_limit_is_refused_and_the_round_stays_open(quota, within, beyond):
    play = Play(**quota)
    play.open()
    assert not play.is_refused(within)
    assert play.is_refused(beyond)
    answers = play.say(dataclasses.replace(within, session=session_of(1)))
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
    assert play.kept == [PAIR + 2 * (ROUND + SIZE)]
    assert play.is_refused(contribution(0, key=key(step=2)))
    # Nothing of it was kept, no round was opened for it, and what was taken before may be repeated.
    assert play.kept == [PAIR + 2 * (ROUND + SIZE)]
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
        play.say(register(member, group="pair", session=b"pair---%d" % member))
    assert not play.is_refused(contribution(0))
    assert play.is_refused(contribution(0, key=key(group="pair"), session=b"pair---0"))
    assert not play.is_refused(contribution(0, key=key(job="other"), session=session_of(0, "other")))


def test_a_long_run_keeps_the_same_number_of_bytes():
    play = Play()
    play.open()
    kept = []
    for step in range(3 * limits.KEPT_ROUNDS):
        play.say(contribution(0, key=key(step=step)), contribution(1, key=key(step=step)))
        kept += play.kept
    assert len(set(kept[limits.KEPT_ROUNDS :])) == 1
    assert kept[0] > 2 * SIZE


@pytest.mark.parametrize(
    "ends",
    [
        [Leave(session_of(0), ""), Leave(session_of(1), "")],
        [register(0, epoch=1, session=b"session9"), Leave(b"session9", "")],
    ],
    ids=["left", "replaced"],
)
def test_a_job_that_ends_gives_all_room_back(ends):
    play = Play()
    play.open()
    play.say(contribution(0), contribution(1), contribution(0, key=key(step=1)))
    assert play.dispatcher._budget.kept("job 'job'") > 3 * SIZE
    play.say(*ends)
    assert play.kept == []
    assert play.dispatcher._budget.account.held == 0


PAST = {"server": b"server-9", "known": Members.of([0, 1]), "results": 1}


def test_what_is_put_off_after_a_restart_counts_and_is_given_back():
    aggregate = play_aggregate()
    back = Play()
    back.say(register(0, **PAST), Result(session_of(0), aggregate))
    results = back.kept[0]
    assert results > GROUP_BYTES + MEMBER_BYTES + 2 * NAMED_BYTES + ROUND_BYTES
    play = Play(max_tenant_bytes=results + SIZE)
    play.say(register(0, **PAST), Result(session_of(0), aggregate))
    assert not play.is_refused(contribution(0, key=key(step=1)))
    assert play.kept == [results + SIZE]
    assert play.is_refused(contribution(0, key=key(step=2)))
    play.say(Leave(session_of(0), ""))
    assert play.dispatcher._budget.account.held == 0


def test_results_after_a_restart_count():
    play = Play(max_tenant_bytes=GROUP_BYTES + MEMBER_BYTES + 2 * NAMED_BYTES)
    play.say(register(0, **PAST))
    assert play.is_refused(Result(session_of(0), play_aggregate()))


def play_aggregate() -> Any:
    play = Play()
    play.open()
    return play.say(contribution(0), contribution(1))[0]


def test_the_report_tells_what_was_refused():
    play = Play(max_members=1)
    assert "over a limit" not in describe(play.dispatcher.report(0.0, ANYBODY))
    play.say(register(0, 2))
    (answer,) = play.say(StatusRequest())
    assert answer.report["over_limits"] == 1
    assert "1 messages over a limit" in describe(answer.report)


# Connections, over real sockets.


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Starts a service in a thread, with a quota."""
    with ExitStack() as stack:

        def run(**quota: float) -> Service:
            service = stack.enter_context(Service(Config((ANY_PORT,), quota=Quota(**quota))))
            thread = threading.Thread(target=service.run, daemon=True)
            thread.start()
            stack.callback(thread.join, WAIT_SECONDS)
            stack.callback(service.stop)
            return service

        yield run


@pytest.fixture
def dial() -> Iterator[Callable[[Service], zmq.Socket]]:
    """Opens sockets without the client."""
    with zmq.Context() as context, ExitStack() as stack:

        def connect(service: Service) -> zmq.Socket:
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.connect(service.endpoints[0])
            return dealer

        yield connect


def told(service: Service, name: str) -> int:
    return ask(service.endpoints[0])[name]


def hangs_up(connection: socket.socket) -> float:
    """Seconds until the server ends a connection."""
    started = time.monotonic()
    connection.settimeout(WAIT_SECONDS)
    while connection.recv(4096):
        pass
    return time.monotonic() - started


def test_a_handshake_that_does_not_end_is_ended(serve):
    service = serve(handshake_seconds=0.5)
    address = ("127.0.0.1", int(service.endpoints[0].rpartition(":")[2]))
    with socket.create_connection(address) as stranger:
        assert hangs_up(stranger) < 10.0
    wait_until(lambda: told(service, "refused_connections") == 1)


def test_a_connection_over_which_no_member_speaks_is_ended_and_a_members_is_not(serve, dial):
    service = serve(idle_seconds=0.5, max_refusals=2**20)
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    with Connection(ZmqTransport(service.endpoints[0]), who) as member:
        # The member may have its answer before the server has noted whose connection it is.
        wait_until(lambda: len(service._connections.members) > 0, WAIT_SECONDS)
        before = len(service._connections.members)
        stranger = dial(service)
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            # However often it speaks, it says nothing.
            wait_until(lambda: stranger.send(b"garbage") or monitor.poll(0), WAIT_SECONDS)
            stranger.disable_monitor()
        assert told(service, "idle_connections") >= 1
        # The member has been silent but for its heartbeats, for longer than that.
        assert len(service._connections.members) >= before
        assert member.exchange("bn", rows(2.0)).values.item() == 2.0


def test_a_member_that_has_gone_leaves_nothing_behind(serve):
    service = serve()
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    for _ in range(3):
        Connection(ZmqTransport(service.endpoints[0]), who).close()
    wait_until(lambda: not service._connections.members)


def test_a_frame_that_is_read_after_the_end_of_its_connection_leaves_nothing_behind():
    connections = Connections(most_refusals=1)
    with socket.socket() as open_one:
        number = open_one.fileno()
        connections.accepted(0.0, number)
        connections.heard(0.0, number, "", b"one")
        connections.ended(number)
        connections.accepted(1.0, number)
        connections.heard(1.0, number, "", b"one")
        connections.heard(1.0, number, "", b"other")
        assert connections.members == {b"other"}
        connections.ended(number)
    assert connections.members == set()


def test_a_status_is_answered_over_a_connection_that_was_ended_before(serve, dial):
    service = serve(idle_seconds=0.3)
    dealer = dial(service)
    for _ in range(3):
        dealer.send(encode(StatusRequest()))
        assert dealer.poll(WAIT_SECONDS * 1000)
        report = decode(dealer.recv()).report
        wait_until(lambda before=report: told(service, "idle_connections") > before["idle_connections"])


def test_who_does_not_read_loses_answers_and_the_server_keeps_few(serve, dial):
    """The answers are errors; the network holds some, the queues `max_unread` each, and the rest is dropped."""
    service = serve(max_unread=2)
    stranger = dial(service)
    stranger.rcvhwm = 1
    deadline = time.monotonic() + WAIT_SECONDS
    while told(service, "dropped_answers") == 0:
        for _ in range(500):
            stranger.send(b"garbage")
        assert time.monotonic() < deadline, "nothing was dropped"
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    with Connection(ZmqTransport(service.endpoints[0]), who) as member:
        assert member.exchange("bn", rows(2.0)).values.item() == 2.0


def test_who_does_not_read_does_not_grow_the_servers_memory(serve, dial, caplog):
    """Without a bound what waits would take 30 MB."""
    caplog.set_level(logging.CRITICAL, "statsd_bn.server")  # pytest keeps what is logged
    service = serve(max_unread=2, max_refusals=2**20)
    stranger = dial(service)
    stranger.sndtimeo = int(WAIT_SECONDS * 1000)
    long = "n" * limits.MAX_NAME_BYTES
    frame = encode(contribution(0, key=key(long, job=long, group=long)))

    def refused(frames: int) -> int:
        """Sends them; returns what this process takes once all have been refused."""
        told_before = told(service, "strangers")
        for _ in range(frames):
            stranger.send(frame)
        wait_until(lambda: told(service, "strangers") == told_before + frames, WAIT_SECONDS)
        return _resident_bytes()

    before = refused(10_000)  # the queues and the network are full from then on, and the allocator has what it needs
    dropped = told(service, "dropped_answers")
    after = refused(30_000)
    assert told(service, "dropped_answers") - dropped > 10_000
    assert after - before < 2**23


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_connection_over_which_too_much_is_refused_is_told_so_and_ended(serve, dial):
    service = serve(max_refusals=5)
    stranger = dial(service)
    with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        for _ in range(100):
            stranger.send(encode(contribution(0)))
        assert monitor.poll(WAIT_SECONDS * 1000), "not ended"
        stranger.disable_monitor()
    codes = [decode(stranger.recv()).code]
    while stranger.poll(0):
        codes.append(decode(stranger.recv()).code)
    assert set(codes) == {"unknown_session", "limit"}
    assert codes.index("limit") > 5
    report = ask(service.endpoints[0])
    assert report["flooding_connections"] == codes.count("limit")
    assert report["strangers"] == codes.count("unknown_session") < 100


def test_over_a_members_connection_anything_may_be_refused(serve, dial):
    service = serve(max_refusals=5)
    member = dial(service)
    frames = [encode(register(0, 1)), *[b"garbage"] * 100, encode(StatusRequest())]
    for frame in frames:
        member.send(frame)
    answers = []
    for _ in frames:
        assert member.poll(WAIT_SECONDS * 1000)
        answers.append(decode(member.recv()))
    assert answers[-1].report["bad_frames"] == 100
    assert answers[-1].report["flooding_connections"] == 0


def test_what_was_refused_is_forgiven_after_a_while():
    connections = Connections(most_refusals=2)
    for _ in range(3):
        assert [connections.refused(b"one") for _ in range(3)] == [False, False, True]
        assert not connections.refused(b"other")
        assert connections.ignored == {b"one"}
        connections.forgive()
        assert connections.ignored == set()


def test_messages_of_strangers_are_counted_and_those_of_members_are_not():
    play = Play()
    messages = contribution(0), Heartbeat(session_of(0)), Result(session_of(0), play_aggregate())
    for number, message in enumerate(messages, start=1):
        play.say(message)
        assert play.dispatcher.refused == play.dispatcher.tally.strangers == number
    # One who is back after a restart, and has not yet told what it announced, is no stranger.
    play.say(register(0, **PAST), Heartbeat(session_of(0)), contribution(0), StatusRequest())
    assert play.dispatcher.refused == 3


def test_a_client_is_told_of_a_limit_by_its_error(serve):
    service = serve(max_channels=2)
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    with Connection(ZmqTransport(service.endpoints[0]), who) as member:
        with pytest.raises(LimitExceeded, match="expected at most 2 channels, got 3") as caught:
            member.exchange("bn", rows(1.0, channels=3))
        assert caught.value.fields["limit"] == 2
    assert told(service, "over_limits") == 1


def test_the_page_about_security_lists_every_limit_with_its_default():
    page = (Path(__file__).parent.parent / "docs" / "security.md").read_text()
    listed = dict(re.findall(r"^\| `--([a-z-]+)` \| ([0-9.]+) \|", page, re.MULTILINE))
    assert listed == {
        option.name.replace("_", "-"): f"{option.default:g}"
        if isinstance(option.default, float)
        else str(option.default)
        for option in OPTIONS
    }
