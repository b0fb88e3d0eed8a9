"""Limits: each refuses what is beyond it, counts it, and leaves everybody else alone."""

import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from client.connection.connection import Connection
from client.connection.member import Member
from client.connection.transport import ZmqTransport
from server import Service
from server.cli.status import ask, describe
from server.config import from_arguments, parser
from server.core.dispatcher import Dispatcher
from server.limits.access import ANYBODY, Tenant
from server.limits.account import CONTRIBUTION_BYTES, FUTURE_BYTES, GROUP_BYTES, MEMBER_BYTES, NAMED_BYTES, ROUND_BYTES
from server.limits.quota import Quota
from server.network.connections import SETTLING_SECONDS, Connections
from server.network.gate import SOON_BACK, Gate
from server.network.refusals import MEMORY_SECONDS, Refusals
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, LimitExceeded
from statsd_bn.members import Members
from statsd_bn.messages import Failure, Heartbeat, Leave, Message, Result, Status, StatusRequest
from statsd_bn.wire import decode, encode
from support.memory_members import wait_until
from support.strategies import contribution, key, register, rows, session_of

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
            self.received = self.dispatcher.receive(self.now, peer, encode(message))
            replies = self.received.replies
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
    assert results > GROUP_BYTES + MEMBER_BYTES + 2 * NAMED_BYTES + CONTRIBUTION_BYTES
    play = Play(max_tenant_bytes=results + SIZE)
    play.say(register(0, **PAST), Result(session_of(0), aggregate))
    assert not play.is_refused(contribution(0, key=key(step=1)))
    assert play.kept == [results + SIZE]
    assert play.is_refused(contribution(0, key=key(step=2)))
    play.say(Leave(session_of(0), ""))
    assert play.dispatcher._budget.account.held == 0


def test_whoever_is_lost_while_the_account_is_full_takes_what_it_put_off_along_and_no_more():
    play = Play()
    for member in (0, 1):
        known = {**PAST, "known": Members.of([0, 1, 2]), "results": 0}
        play.say(register(member, 3, min_members=1, **known))
        assert not play.is_refused(contribution(member, key=key(step=1)))
    account = play.dispatcher._budget.account
    before, share = account.held, account.share("job 'job'")
    account.keep(share, account.most_of_one)
    play.say(Leave(session_of(1), "it failed"))
    account.keep(share, -account.most_of_one)
    assert account.held == before - SIZE - MEMBER_BYTES - NAMED_BYTES


def test_one_that_names_more_members_than_there_is_room_for_is_refused():
    play = Play(max_tenant_bytes=GROUP_BYTES + 2 * MEMBER_BYTES + 100 * NAMED_BYTES)
    assert play.is_refused(register(0, **{**PAST, "known": Members.of(range(10_000))}))
    assert not play.is_refused(register(0, **PAST))


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
    service = serve(idle_seconds=0.5, silent_seconds=0.5, max_refusals=2**20, max_bad_frames=2**20)
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    with Connection(ZmqTransport(service.endpoints[0]), who) as member:
        # The member may have its answer before the server has noted whose connection it is.
        wait_until(lambda: len(service._watch.members) > 0, WAIT_SECONDS)
        before = len(service._watch.members)
        stranger = dial(service)
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            # However often it speaks, it says nothing.
            wait_until(lambda: stranger.send(b"garbage") or monitor.poll(0), WAIT_SECONDS)
            stranger.disable_monitor()
        assert told(service, "idle_connections") >= 1
        # The member has been silent but for its heartbeats, for longer than that.
        assert len(service._watch.members) >= before
        assert member.exchange("bn", rows(2.0)).values.item() == 2.0


def test_a_member_that_has_gone_leaves_nothing_behind(serve):
    service = serve()
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    for _ in range(3):
        Connection(ZmqTransport(service.endpoints[0]), who).close()
    wait_until(lambda: not service._watch.members)


def test_a_frame_that_is_read_after_the_end_of_its_connection_leaves_nothing_behind():
    connections = Connections(Quota(), most_of_key=1)
    with socket.socket() as open_one:
        number = open_one.fileno()
        connections.accepted(0.0, number)
        connections.heard(0.0, number, with_key(""), b"one", b"session")
        connections.ended(number)
        connections.accepted(1.0, number)
        connections.heard(1.0, number, with_key(""), b"one", b"session")
        connections.heard(1.0, number, with_key(""), b"other", b"session")
        assert connections.members.keys() == {b"other"}
        connections.ended(number)
    assert not connections.members


def test_a_status_is_answered_over_a_connection_that_was_ended_before(serve, dial):
    service = serve(idle_seconds=0.3)
    dealer = dial(service)
    for _ in range(3):
        dealer.send(encode(StatusRequest()))
        assert dealer.poll(WAIT_SECONDS * 1000)
        report = decode(dealer.recv()).report
        wait_until(lambda before=report: told(service, "idle_connections") > before["idle_connections"])


# No connection is closed for what is refused on it, or for its age: a slow machine may take minutes.
NEVER_CLOSED = {
    "max_refusals": 2**20,
    "max_bad_frames": 2**20,
    "max_refused_seconds": 86_400.0,
    "idle_seconds": 86_400.0,
    "silent_seconds": 86_400.0,
}


def test_who_does_not_read_loses_answers_and_the_server_keeps_few(serve, dial):
    """The answers are errors; the network holds some, the queues `max_unread` each, and the rest is dropped."""
    service = serve(max_unread=2, **NEVER_CLOSED)
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
    service = serve(max_unread=2, **NEVER_CLOSED)
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


def test_over_a_members_connection_no_more_may_be_refused_than_over_any_other(serve, dial):
    service = serve(max_bad_frames=5)
    member = dial(service)
    for frame in [encode(register(0, 1)), *[b"garbage"] * 100, encode(StatusRequest())]:
        member.send(frame)
    codes = []
    while "limit" not in codes:
        assert member.poll(WAIT_SECONDS * 1000)
        codes.append(getattr(decode(member.recv()), "code", ""))
    assert codes.count("protocol") == 6
    report = ask(service.endpoints[0])
    assert (report["bad_frames"], report["flooding_connections"]) == (6, 1)


def test_messages_that_cost_much_to_refuse_are_weighed(serve, dial):
    """Each took a quarter of a second: an array of a million empty ones is built before it is seen to be senseless."""
    service = serve()
    stranger = dial(service)
    body = b"\xdd" + (2**20 - 5).to_bytes(4) + b"\x90" * (2**20 - 5)
    frame = encode(StatusRequest())[:4] + len(body).to_bytes(4, "little") + body
    for _ in range(27):
        stranger.send(frame)
    codes = []
    while "limit" not in codes:
        assert stranger.poll(WAIT_SECONDS * 1000)
        codes.append(decode(stranger.recv()).code)
    assert told(service, "bad_frames") == codes.count("protocol") < 27


def test_a_member_may_be_refused_once_for_each_group_after_a_restart(serve, dial):
    service = serve()
    member = dial(service)
    member.send(encode(register(0, 1)))
    for number in range(1000):
        member.send(encode(Heartbeat(number.to_bytes(limits.TOKEN_BYTES))))
    member.send(encode(StatusRequest()))
    answers: list[Any] = []
    while not isinstance(answers and answers[-1], Status):
        assert member.poll(WAIT_SECONDS * 1000)
        answers.append(decode(member.recv()))
    assert answers[-1].report["flooding_connections"] == 0


def test_a_connection_whose_member_has_left_is_ended_like_any_other(serve, dial):
    service = serve(idle_seconds=0.5)
    former = dial(service)
    with former.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        former.send(encode(register(0, 1)))
        former.send(encode(Leave(session_of(0), "")))
        assert monitor.poll(WAIT_SECONDS * 1000), "not ended"
        former.disable_monitor()
    assert told(service, "idle_connections") >= 1


@pytest.mark.parametrize(
    ("quota", "frames"),
    [
        ({"max_refusals": 2}, [(0.0, False)] * 3),
        ({"max_bad_frames": 2}, [(0.0, True)] * 3),
        ({"max_refused_seconds": 0.5}, [(0.2, False), (0.2, True), (0.2, False)]),
    ],
)
def test_what_is_refused_is_counted_and_weighed(quota, frames):
    refusals = Refusals(Quota(**quota))
    errors = [refusals.add(b"one", seconds, is_bad=is_bad) for seconds, is_bad in frames]
    assert errors[:-1] == [None, None]
    assert isinstance(errors[-1], LimitExceeded)
    assert refusals.add(b"other", 0.01, is_bad=True) is None


def test_what_was_refused_is_forgiven_after_a_while_and_what_made_no_sense_later():
    refusals = Refusals(Quota(max_refusals=2, max_bad_frames=3))
    for turn in range(3):
        assert refusals.add(b"one", 0.0, is_bad=True) is None
        refusals.forgive(turn * 0.25)
    assert isinstance(refusals.add(b"one", 0.0, is_bad=True), LimitExceeded)
    refusals.forgive(MEMORY_SECONDS)
    assert refusals.add(b"one", 0.0, is_bad=True) is None


def test_a_connection_that_is_being_ended_is_ignored_until_all_has_been_read_that_had_come():
    refusals = Refusals(Quota())
    refusals.ignore(1.0, b"one")
    refusals.forgive(1.0 + MEMORY_SECONDS / 2)
    assert b"one" in refusals.ignored
    refusals.forgive(1.0 + MEMORY_SECONDS)
    assert b"one" not in refusals.ignored


def with_key(key: str) -> Tenant:
    return Tenant(key, key, ("*",))


@pytest.fixture
def connected() -> Iterator[Callable[..., tuple[Connections, list[int]]]]:
    """Connections, one accepted each second from 0 on."""
    with ExitStack() as stack:

        def make(n: int, most_of_key: int = 100, **quota: float) -> tuple[Connections, list[int]]:
            connections = Connections(Quota(**quota), most_of_key)
            numbers = [stack.enter_context(socket.socket()).fileno() for _ in range(n)]
            for second, number in enumerate(numbers):
                connections.accepted(float(second), number)
            return connections, numbers

        yield make


def test_a_connection_that_says_nothing_is_overdue_sooner_than_one_that_has_spoken(connected):
    connections, (silent, speaker, member) = connected(3, idle_seconds=60.0, silent_seconds=10.0)
    connections.heard(2.0, speaker, with_key(""))
    connections.heard(2.0, member, with_key(""), b"peer", b"session")
    assert connections.overdue(10.0) == []
    assert connections.overdue(10.5) == [silent]
    assert connections.overdue(63.0) == [speaker, silent]


def test_of_too_many_silent_connections_the_oldest_are_overdue_and_none_that_has_just_come(connected):
    connections, numbers = connected(5, max_silent=1)
    connections.heard(5.0, numbers[0], with_key(""))
    assert connections.overdue(2.5 + SETTLING_SECONDS) == [numbers[1]]
    assert connections.overdue(4.5 + SETTLING_SECONDS) == numbers[1:4]


def test_a_connection_is_a_members_while_its_session_is_registered(connected):
    connections, (number,) = connected(1, idle_seconds=60.0)
    connections.heard(1.0, number, with_key(""), b"peer", b"session")
    connections.leave(100.0, lambda session: session == b"session")
    assert connections.members.keys() == {b"peer"}
    assert connections.overdue(100.0) == []
    connections.leave(100.0, lambda _: False)
    assert not connections.members
    assert connections.overdue(160.0) == []
    assert connections.overdue(160.5) == [number]


def test_a_key_has_only_so_many_connections_and_another_key_as_many(connected):
    connections, numbers = connected(4, most_of_key=1)
    assert connections.heard(4.0, numbers[0], with_key("alice"))
    assert connections.heard(4.0, numbers[0], with_key("alice"))
    assert not connections.heard(4.0, numbers[1], with_key("alice"))
    assert connections.heard(4.0, numbers[2], with_key("bob"))
    connections.ended(numbers[0])
    assert connections.heard(5.0, numbers[1], with_key("alice"))


def test_new_connections_come_at_once_up_to_a_number_and_then_at_a_rate():
    gate = Gate(at_once=2, per_second=4.0, soon_back=2, timeout=0.0)
    assert [gate.wait_of(0.0, "alice") for _ in range(3)] == [0.0, 0.0, None]
    assert gate.wait_of(0.0, "bob") == 0.0
    assert gate.wait_of(0.125, "alice") is None
    assert gate.wait_of(0.25, "alice") == 0.0
    assert [gate.wait_of(100.0, "alice") for _ in range(3)] == [0.0, 0.0, None]


def test_new_connections_wait_in_line_while_it_is_short():
    gate = Gate(at_once=1, per_second=4.0, soon_back=1, timeout=0.5)
    assert [gate.wait_of(0.0, "alice") for _ in range(4)] == [0.0, 0.25, 0.5, None]
    assert gate.wait_of(0.0, "bob") == 0.0
    assert gate.wait_of(0.25, "alice") == 0.5


def test_many_connections_at_once_come_back_more_slowly_than_a_few():
    gate = Gate(at_once=8, per_second=4.0, soon_back=2, timeout=0.0)
    assert [gate.wait_of(0.0, "alice") for _ in range(9)] == [0.0] * 8 + [None]
    assert [gate.wait_of(5.5, "alice") for _ in range(4)] == [0.0] * 3 + [None]


@pytest.mark.parametrize("pause", [20.0, 30.0, 100.0, 1000.0, 5500.0, 10_000.0])
def test_a_stranger_who_takes_all_connections_meets_an_id_less_than_once_in_a_month(pause):
    """It holds ids with half of them, for as long as a silent connection may; then the other half comes."""
    quota = Quota()
    gate = Gate(quota.max_new_connections, quota.connections_per_second, soon_back=SOON_BACK, timeout=0.0)

    def taken(now: float) -> int:
        return sum(gate.wait_of(now, "") is not None for _ in range(quota.max_new_connections))

    assert taken(0.0) == quota.max_new_connections
    together = taken(pause) + quota.silent_seconds * quota.connections_per_second
    assert 2**32 * (pause + quota.silent_seconds) / (together / 2) ** 2 > 30 * 86_400


def test_a_connection_too_many_waits_and_comes_in_later(serve, dial):
    service = serve(max_new_connections=1, connections_per_second=2.0, handshake_seconds=0.5)
    for _ in range(3):
        dealer = dial(service)
        dealer.send(encode(StatusRequest()))
        assert dealer.poll(WAIT_SECONDS * 1000)
    assert decode(dealer.recv()).report["refused_connections"] >= 1


def test_messages_of_strangers_are_counted_and_those_of_members_are_not():
    play = Play()
    messages = contribution(0), Heartbeat(session_of(0)), Result(session_of(0), play_aggregate())
    for number, message in enumerate(messages, start=1):
        play.say(message)
        assert play.received.is_refused
        assert not play.received.is_unsound
        assert play.dispatcher.tally.strangers == number
    # One who is back after a restart, and has not yet told what it announced, is no stranger.
    for message in (register(0, **PAST), Heartbeat(session_of(0)), contribution(0), StatusRequest()):
        play.say(message)
        assert not play.received.is_refused
    assert play.dispatcher.tally.strangers == 3


def test_a_client_is_told_of_a_limit_by_its_error(serve):
    service = serve(max_channels=2)
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    with Connection(ZmqTransport(service.endpoints[0]), who) as member:
        with pytest.raises(LimitExceeded, match="expected at most 2 channels, got 3") as caught:
            member.exchange("bn", rows(1.0, channels=3))
        assert caught.value.fields["limit"] == 2
    assert told(service, "over_limits") == 1
