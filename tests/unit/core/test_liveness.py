"""Members that end without a Leave message, in simulated time with the ticks of a server."""

import math
from typing import Any

import numpy as np
import pytest

from server.core.dispatcher import Dispatcher
from server.core.registry import LAUNCHER_STOP_SECONDS
from server.group.recovery import RECONNECT_SECONDS
from server.network import service
from server.security.quota import Quota
from statsd_bn import limits, messages
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import digest
from statsd_bn.skew import FIGURES
from statsd_bn.wire import decode, encode
from support.strategies import KEY, contribution, key, register, session_of

STRANGER = b"stranger"
SILENCE = limits.SILENCE_SECONDS
RESULT = messages.Result(session_of(2), messages.Aggregate(KEY, 1, 1, Members.of([2]), np.ones((1, 1))))

# Other messages on the heartbeat socket.
ROUND_TRIPS = messages.RoundTrips(session_of(0), 5, (1, *[0] * (limits.BUCKETS - 1)))
LATENESS = messages.LatenessReport(session_of(0), 5, ROUND_TRIPS.counts)
DIGEST = messages.SkewStats(session_of(0), 0, "bn", np.full((1, 2, FIGURES), 0.5))

Answers = list[tuple[bytes, messages.Message]]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(b"server-0", self.now)

    def send(self, message: messages.Message, at: bytes) -> Answers:
        return read(self.dispatcher.receive(self.now, at, encode(message)).replies)

    def open(self, world_size: int = 3, **given: Any) -> None:
        for member in range(world_size):
            self.send(register(member, world_size, **given), peer(member))

    def contribute(self, member: int, key=KEY, at: bytes = b"") -> Answers:
        return self.send(contribution(member, 1.0, key), at or peer(member))

    def beat(self, *members: int) -> None:
        for member in members:
            assert self.send(messages.Heartbeat(session_of(member)), beacon(member)) == []

    def pass_time(self, seconds: float, alive: tuple[int, ...] = ()) -> Answers:
        """Tick; members that are alive send heartbeats before each tick."""
        answers: Answers = []
        ticks = math.ceil(seconds / service.TICK_SECONDS)
        for _ in range(ticks):
            self.now += seconds / ticks
            self.beat(*alive)
            # Requests and failures on a heartbeat socket are tested elsewhere.
            answers += [one for one in read(self.dispatcher.tick(self.now)) if not one[0].startswith(b"beacon")]
        return answers

    def cut(self, *peers: bytes) -> list[bytes]:
        """Makes these peers unreachable; returns the other peers that the dispatcher then probes."""
        return [other for one in peers for other, _ in self.dispatcher.unreachable(self.now, one)]

    @property
    def present(self) -> list[int]:
        groups = self.dispatcher.report(self.now)["groups"]
        return [contributor["member"] for group in groups for contributor in group["members"]]


def read(replies: list[tuple[bytes, bytes]]) -> Answers:
    return [(peer_id, decode(frame)) for peer_id, frame in replies]


def peer(member: int) -> bytes:
    return b"peer %d" % member


def beacon(member: int) -> bytes:
    return b"beacon %d" % member


@pytest.fixture
def clock() -> Clock:
    return Clock()


# Silence.


def test_an_answer_to_a_stack_request_gives_a_silent_member_no_more_time(clock):
    clock.open()
    clock.beat(0, 1, 2)
    clock.contribute(0)
    clock.pass_time(1.25, alive=(0, 1))
    clock.send(messages.StackReport(session_of(2), 1, "", 0, "", Members.of(()), 0), beacon(2))
    ((peer_id, failure),) = clock.pass_time(SILENCE - 1.25, alive=(0, 1))
    assert (peer_id, failure.code) == (peer(0), "replica_lost")


def test_ranks_that_wait_now_or_later_learn_that_a_silent_member_is_lost(clock):
    clock.open()
    for member in (0, 1, 2):
        clock.contribute(member, key(step=4))
    clock.contribute(0, key(step=5))
    ((peer_id, failure),) = clock.pass_time(SILENCE, alive=(0, 1))
    assert (peer_id, failure.code, failure.key) == (peer(0), "replica_lost", key(step=5))
    cause = "no sign of life for 3.5 s"
    assert failure.message == f"rank 2 (place 2) was lost: {cause}\n  in job 'job', group 'world', step 5"
    assert failure.fields == {"job": "job", "group": "world", "member": 2, "step": 5, "cause": cause}
    ((_, later),) = clock.contribute(1, key(step=5))
    assert (later.code, later.fields) == ("replica_lost", failure.fields)


@pytest.mark.parametrize("step", [8, 60])
def test_the_error_gives_the_step_in_which_the_others_wait_for_the_lost_member(clock, step):
    """A member reports its step only once a second, and may do hundreds of steps in between in shared memory."""
    clock.open()
    for member in (0, 1, 2):
        clock.contribute(member, key(step=4))
    clock.send(messages.Heartbeat(session_of(2), 7, 90, "shared_memory"), beacon(2))
    clock.contribute(0, key(step=step))
    ((_, failure),) = clock.pass_time(SILENCE, alive=(0, 1))
    assert failure.fields["step"] == step


def test_a_silent_member_is_lost_only_after_the_whole_limit(clock):
    clock.open()
    assert clock.pass_time(SILENCE - 0.01) == []
    assert clock.present == [0, 1, 2]
    clock.pass_time(0.01)
    assert clock.present == []


@pytest.mark.parametrize(
    "sign",
    [
        lambda clock: clock.beat(2),
        lambda clock: clock.contribute(2),
        lambda clock: clock.contribute(2, key(epoch=7)),
        lambda clock: clock.send(register(2, 3), peer(2)),
        lambda clock: clock.send(RESULT, peer(2)),
    ],
    ids=["heartbeat", "contribution", "a refused contribution", "registration", "result"],
)
def test_every_message_of_a_member_is_a_sign_of_life(clock, sign):
    clock.open()
    clock.pass_time(SILENCE - 0.5, alive=(0, 1))
    sign(clock)
    clock.pass_time(SILENCE - 0.5, alive=(0, 1))
    assert clock.present == [0, 1, 2]
    clock.pass_time(0.5, alive=(0, 1))
    assert clock.present == [0, 1]


def test_a_member_that_asks_to_rejoin_a_broken_group_is_alive(clock):
    clock.open()
    clock.send(messages.Leave(session_of(0), "ZeroDivisionError: augmentation"), peer(0))
    for _ in range(2):
        clock.pass_time(SILENCE - 0.5, alive=(1,))
        ((_, failure),) = clock.send(register(2, 3), peer(2))
        assert (failure.code, failure.fields["member"]) == ("replica_lost", 0)
    assert clock.present == [1, 2]


def test_messages_of_others_are_no_sign_of_life(clock):
    clock.open()
    clock.pass_time(SILENCE - 0.5, alive=(0, 1))
    clock.send(register(2, 3, session=STRANGER), peer(2))
    assert clock.send(messages.Heartbeat(STRANGER), peer(2))[0][1].code == "unknown_session"
    clock.pass_time(0.5, alive=(0, 1))
    assert clock.present == [0, 1]


def test_a_member_that_falls_silent_before_the_group_is_open_frees_its_rank(clock):
    clock.send(register(0, 3), peer(0))
    clock.send(register(1, 3), peer(1))
    assert clock.pass_time(SILENCE, alive=(0,)) == []
    assert clock.present == [0]
    clock.send(register(1, 3, session=STRANGER), b"new")
    assert [answer.missing for _, answer in clock.send(register(2, 3), peer(2))] == [0, 0, 0]


def test_a_member_that_returns_before_the_group_is_open_is_accepted_again(clock):
    clock.send(register(0, 2), peer(0))
    clock.send(register(1, 2), peer(1))
    clock.dispatcher = Dispatcher(b"server-0", clock.now)
    clock.send(register(1, 2), peer(1))
    clock.pass_time(SILENCE)
    assert clock.present == []
    assert clock.send(register(1, 2), peer(1))[0][1].present == Members.of([1])


def test_only_losses_soon_after_the_first_one_in_a_job_are_warnings(clock, caplog):
    clock.open(4)
    with caplog.at_level("INFO", "statsd_bn.server"):
        clock.pass_time(SILENCE, alive=(0, 1, 2))
        clock.pass_time(SILENCE, alive=(0, 1))
        clock.pass_time(LAUNCHER_STOP_SECONDS)
    log = [(record.levelname, record.getMessage()) for record in caplog.records if " is lost: " in record.getMessage()]
    assert [level for level, _ in log] == ["WARNING", "WARNING", "INFO", "INFO"]
    assert [f"rank {member} " in text for member, (_, text) in zip((3, 2, 0, 1), log, strict=True)] == [True] * 4


def test_a_process_is_lost_in_each_of_its_groups(clock):
    pair = b"in-pair2"
    clock.open()
    clock.send(register(2, 2, group="pair", session=pair), peer(2))
    clock.send(register(0, 2, group="pair", session=b"in-pair0"), peer(0))
    clock.send(contribution(0, 1.0, key(group="pair"), b"in-pair0"), peer(0))
    clock.contribute(0)
    answers: Answers = []
    for _ in range(4):
        answers += clock.pass_time(SILENCE / 4, alive=(0, 1))
        clock.send(messages.Heartbeat(b"in-pair0"), beacon(0))
    lost = {(peer_id, answer.fields["group"], answer.fields["member"]) for peer_id, answer in answers}
    assert lost == {(peer(0), "world", 2), (peer(0), "pair", 2)}


def test_a_lost_member_that_returns_gets_the_error_and_ends_nothing(clock):
    """A frozen member continues with its old session. That is no new run, so the survivors' group stays."""
    clock.open()
    clock.pass_time(SILENCE, alive=(0, 1))
    for message in (contribution(2, 1.0), register(2, 3), messages.Heartbeat(session_of(2))):
        ((peer_id, failure),) = clock.send(message, peer(2))
        assert (peer_id, failure.code, failure.fields["member"]) == (peer(2), "replica_lost", 2)
    assert clock.present == [0, 1]
    # A registration with a new session still starts a new run.
    assert clock.send(register(2, 3, session=STRANGER), b"new")[0][1].present == Members.of([2])


def test_a_member_that_froze_in_a_round_gets_the_error_too(clock):
    clock.open()
    clock.contribute(2)
    answers = clock.pass_time(SILENCE, alive=(0, 1))
    assert [(peer_id, answer.fields["member"]) for peer_id, answer in answers] == [(peer(2), 2)]


def test_a_delayed_server_declares_no_member_lost(clock):
    """The server's socket still holds the heartbeats that arrived during the delay."""
    clock.open()
    clock.cut(peer(2))
    clock.now += 60.0
    assert clock.dispatcher.tick(clock.now) == []
    assert clock.present == [0, 1, 2]
    clock.pass_time(SILENCE, alive=(0, 1))
    assert clock.present == [0, 1]


@pytest.mark.parametrize("cut", [False, True], ids=["silent", "disconnected"])
def test_a_delayed_server_blames_the_member_that_was_silent_first(clock, cut):
    clock.open()
    for member in (0, 2, 1):
        clock.now += 0.01
        clock.beat(member)
    for member in (2, 1) if cut else ():
        clock.now += 0.01
        clock.cut(peer(member), beacon(member))
    clock.now += 60.0
    assert clock.dispatcher.tick(clock.now) == []
    clock.contribute(0)
    ((_, failure),) = clock.pass_time(SILENCE, alive=(0,))
    assert failure.fields["member"] == 2


def test_a_member_that_left_is_not_lost_later(clock):
    clock.open()
    clock.contribute(0)
    clock.send(messages.Leave(session_of(2), "boom"), peer(2))
    assert clock.pass_time(2 * SILENCE, alive=(0, 1)) == []


# Connections.


def test_probes_go_to_each_member_once_and_answer_no_message(clock):
    clock.open(2)
    clock.send(register(0, 1, group="alone", session=STRANGER), peer(0))
    assert read(clock.dispatcher.probes(clock.now)) == [
        (peer_id, messages.Registered(messages.NO_SERVER, b"server-0", 0, 0, 0, NO_MEMBERS))
        for peer_id in dict.fromkeys(peer_id for peer_id, _ in clock.dispatcher.probes(clock.now))
    ]
    assert {peer_id for peer_id, _ in clock.dispatcher.probes(clock.now)} == {peer(0), peer(1)}


def test_a_member_without_a_later_message_is_probed_at_its_heartbeat_address_if_known(clock):
    clock.open(2)
    clock.beat(0)
    clock.contribute(0)
    assert {peer_id for peer_id, _ in clock.dispatcher.probes(clock.now)} == {beacon(0), peer(1)}
    before = clock.now
    clock.now += 0.02
    clock.contribute(1)
    assert {peer_id for peer_id, _ in clock.dispatcher.probes(before)} == {beacon(0)}


def test_an_unreachable_member_that_sends_no_message_in_time_is_lost(clock):
    clock.open(2)
    clock.contribute(1)
    assert clock.cut(peer(0)) == []
    assert clock.pass_time(RECONNECT_SECONDS - 0.01, alive=(1,)) == []
    ((peer_id, failure),) = clock.pass_time(0.02, alive=(1,))
    assert (peer_id, failure.code, failure.fields["cause"]) == (peer(1), "replica_lost", "the connection was lost")
    assert clock.cut(b"nobody") == []


@pytest.mark.parametrize("how", ["beat", "contribute"])
def test_a_member_that_sends_again_after_a_broken_connection_is_kept(clock, how):
    clock.open(2)
    clock.beat(0)
    clock.cut(peer(0), beacon(0))
    clock.pass_time(RECONNECT_SECONDS - 0.01, alive=(1,))
    getattr(clock, how)(0)
    clock.pass_time(2.0, alive=(1,))
    assert clock.present == [0, 1]


def test_a_member_that_closes_a_channel_is_probed_and_kept(clock):
    clock.open(2)
    clock.beat(0)
    clock.contribute(0, at=b"a channel")
    assert clock.cut(b"a channel") == [beacon(0)]
    clock.pass_time(2.0, alive=(1,))
    assert clock.present == [0, 1]
    assert clock.cut(beacon(0)) == []
    clock.pass_time(0.5, alive=(1,))
    assert clock.present == [1]


@pytest.mark.parametrize("message", [ROUND_TRIPS, LATENESS, DIGEST])
def test_reports_on_the_heartbeat_socket_do_not_replace_the_address_of_rounds(clock, message):
    clock.open(2)
    clock.beat(0)
    assert clock.send(message, beacon(0)) == []
    assert clock.cut(beacon(0)) == [peer(0)]
    clock.pass_time(2.0, alive=(1,))
    assert clock.present == [0, 1]


def test_a_rank_is_free_once_its_holder_is_lost(clock):
    clock.open(2)
    answers = clock.send(register(0, session=STRANGER), b"second")
    assert [(peer_id, answer.code) for peer_id, answer in answers] == [(b"second", "duplicate_member")]
    clock.cut(peer(0))
    clock.pass_time(0.5, alive=(1,))
    assert clock.send(register(0, session=STRANGER), b"second")[0][1].present == Members.of([0])


def test_an_unknown_heartbeat_is_answered_and_a_known_one_is_not(clock):
    ((peer_id, failure),) = clock.send(messages.Heartbeat(STRANGER), b"who")
    assert isinstance(failure, messages.Failure)
    assert (peer_id, failure.code, failure.key) == (b"who", "unknown_session", None)
    assert digest(STRANGER).hex() in failure.message
    clock.open(1)
    assert clock.send(messages.Heartbeat(session_of(0)), b"who") == []


def test_a_server_accepts_longer_silence_by_option(clock):
    clock.dispatcher = Dispatcher(b"server-0", clock.now, Quota(silence_seconds=10.0))
    clock.open()
    assert clock.pass_time(9.5, alive=(0, 1)) == []
    clock.pass_time(0.5, alive=(0, 1))
    assert clock.present == [0, 1]


def test_a_server_that_accepts_longer_silence_waits_longer_for_returning_members(clock):
    clock.dispatcher = Dispatcher(b"server-1", clock.now, Quota(silence_seconds=10.0))
    back = {"server": b"server-0", "known": Members.of([0, 1])}
    clock.send(register(0, 2, **back), peer(0))
    assert clock.pass_time(9.5, alive=(0,)) == []
    (answer,) = clock.pass_time(0.5, alive=(0,))
    assert (answer[1].code, answer[1].fields["member"]) == ("replica_lost", 1)
