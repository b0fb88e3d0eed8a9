"""A server that is stopped or killed and started again loses nothing: the run ends with an undisturbed run's bits."""

import random
import signal
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from client.session.protocol.member import OVER_SERVER, SHARED_MEMORY, Member
from client.session.protocol.session import Session
from client.transports.server import SlavePipe
from programs import chaos_programs
from server.cli.status import ask
from server.core.dispatcher import Dispatcher
from server.group.recovery import RECONNECT_SECONDS
from statsd_bn import limits
from statsd_bn.errors import ReplicaLost
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Failure, Pending, Registered, Result, digest
from statsd_bn.reduction import Rows
from statsd_bn.wire import decode, encode
from support.launched import Launched
from support.memory_members import SERVER, MemoryMaster, wait_until
from support.memory_members import run_members as run_in_memory

# A step takes 30 ms and needs the server, which runs for 0.3 s at most before each kill, so all kills hit the training.
STEPS = 90
PAUSE_SECONDS = 0.01
# Fewer kills with shared memory, where members train on while the server is away.
KILLS = {OVER_SERVER: 5, SHARED_MEMORY: 2}


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/server"


@pytest.fixture
def servers(endpoint, tmp_path):
    command = [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error", "--silence-seconds", "60"]
    with ExitStack() as stack:

        def start():
            started = stack.enter_context(Launched(command, {}, tmp_path / "errors"))
            started.line("listening on ")
            return started.process

        yield start


def run_members(pool, endpoint, job, n, transport=OVER_SERVER):
    return [
        pool.submit(chaos_programs.train_through_restarts, endpoint, job, member, n, STEPS, PAUSE_SECONDS, transport)
        for member in range(n)
    ]


@pytest.mark.parametrize(
    ("seed", "transport"),
    [
        (0, OVER_SERVER),
        pytest.param(1, OVER_SERVER, marks=pytest.mark.long),
        pytest.param(2, SHARED_MEMORY, marks=pytest.mark.long),
    ],
)
def test_kills_at_random_moments_change_no_bit(pool, servers, endpoint, seed, transport):
    server = servers()
    undisturbed = [future.result(timeout=60) for future in run_members(pool, endpoint, "undisturbed", 3)]
    chance = random.Random(seed)
    futures = run_members(pool, endpoint, "killed", 3, transport)
    wait_until(lambda: missing_in(endpoint, "killed", "world") == [0])
    for _ in range(KILLS[transport]):
        time.sleep(chance.uniform(0.05, 0.3))
        server.send_signal(chance.choice((signal.SIGKILL, signal.SIGTERM)))
        server.wait(timeout=10)
        server = servers()
    assert [future.exception() for future in futures if future.done()] == [], "all kills come while the job trains"
    assert [future.result(timeout=60) for future in futures] == undisturbed


def missing_in(endpoint, *names):
    return [group["missing"] for group in ask(endpoint)["groups"] if (group["job"], group["group"]) == names]


# The same without processes, on the pure protocol.

N = 3


class World:
    """Members and a server that can be restarted; the test chooses when each member reads its answers."""

    def __init__(self, group="world", n=N, *, min_members=0):
        self.members = [
            Session(bytes([number]) * 8, Member("job", group, 0, number, n, 60.0, f"place {number}", min_members))
            for number in range(n)
        ]
        self.now = 0.0
        self.restart(b"server-0")
        for session in self.members:
            self.send(session, session.register())
        for session in self.members:
            assert [answer.missing for answer in self.read(session)][-1] == 0

    def restart(self, server):
        self.dispatcher = Dispatcher(server, self.now)
        self.inboxes = defaultdict(list)

    def send(self, session, *frames):
        for frame in frames:
            self.deliver(self.dispatcher.receive(self.now, session.member_token, frame).replies)

    def deliver(self, replies):
        for to, frame in replies:
            self.inboxes[to].append(frame)

    def read(self, session):
        frames = self.inboxes.pop(session.member_token, [])
        for frame in frames:
            session.on_unsolicited(frame)
        return [decode(frame) for frame in frames]

    def take(self, session, key):
        """Gives a session the answer to its round, as a program would; returns the frame."""
        (frame,) = self.inboxes.pop(session.member_token)
        assert isinstance(session.answer(key, frame), Aggregate)
        return frame

    def exchange(self, layer):
        for number, session in enumerate(self.members):
            self.send(session, session.contribution(key := session.forward_key(layer), rows_of(number)))
        return [self.take(session, key) for session in self.members]

    def heartbeats(self, *sessions):
        for session in sessions:
            self.send(session, session.heartbeat())


def rows_of(number, value=1.0):
    return Rows((1,), np.full((1, 2, 1), value * (number + 1)))


def codes(answers):
    return [answer.code for answer in answers]


def restarted(**given):
    """A world after a round: its members begin the next round at a new server, which does not know them."""
    world = World(**given)
    world.exchange("bn")
    key, *_ = [session.forward_key("bn2") for session in world.members]
    world.restart(b"server-1")
    return world, key


def come_back(world, session, key):
    world.send(session, *session.resync_frames(), session.contribution(key, rows_of(session.member.rank)))


def test_an_answer_that_only_one_member_got_has_the_same_bytes_after_a_restart():
    world = World()
    ahead, *others = world.members
    for number, session in enumerate(world.members):
        key = session.forward_key("bn")
        world.send(session, session.contribution(key, rows_of(number)))
    expected = world.take(ahead, key)
    world.restart(b"server-1")
    following = ahead.forward_key("bn2")
    world.send(ahead, ahead.contribution(following, rows_of(0, 7.0)))
    for number, session in enumerate(others, 1):
        world.send(session, session.contribution(key, rows_of(number), attempt=1))
    for session in world.members:
        (failure,) = world.read(session)
        assert (failure.code, failure.fields) == ("unknown_session", {"digest": digest(session.member_token).hex()})
        world.send(session, *session.resync_frames())
    world.send(ahead, ahead.contribution(following, rows_of(0, 7.0), attempt=1))
    for session in world.members:
        world.read(session)
    for number, session in enumerate(others, 1):
        world.send(session, session.contribution(key, rows_of(number), attempt=2))
    for session in others:
        assert world.inboxes[session.member_token][-1] == expected
        del world.inboxes[session.member_token][:-1]
        world.take(session, key)
    for number, session in enumerate(others, 1):
        world.send(session, session.contribution(session.forward_key("bn2"), rows_of(number, 7.0)))
    assert len({world.take(session, following) for session in world.members}) == 1


def test_early_contributions_after_a_restart_are_answered_when_all_are_back():
    world, key = restarted()
    first, second, third = world.members
    for session in (first, second):
        world.send(session, *session.resync_frames())
        world.read(session)
    world.send(first, first.contribution(key, rows_of(0)))
    world.send(second, second.contribution(key, rows_of(1), attempt=1))
    assert world.read(first) == []
    (pending,) = world.read(second)
    assert isinstance(pending, Pending)
    assert "waiting for rank 2 to reconnect to the restarted server" in pending.message
    world.send(third, *third.resync_frames())
    for session in world.members:
        *_, registered = (answer for answer in world.read(session) if isinstance(answer, Registered))
        assert (registered.missing, registered.server) == (0, b"server-1")
    world.send(third, third.contribution(key, rows_of(2)))
    assert len({world.take(session, key) for session in world.members}) == 1


def test_a_deferred_contribution_is_dropped_when_its_member_leaves():
    world, key = restarted()
    first, second, _ = world.members
    for session in (first, second):
        come_back(world, session, key)
    for session in (first, second):
        world.read(session)
    world.send(first, first.leave("boom"))
    assert world.read(first) == []
    (lost,) = world.read(second)
    assert (lost.code, lost.fields["member"], lost.fields["cause"]) == ("replica_lost", 0, "boom")


def test_only_the_latest_results_are_resent_in_order():
    world = World(n=1)
    (session,) = world.members
    frames = [frame for number in range(20) for frame in world.exchange(f"bn{number}")]
    register, *results = [decode(frame) for frame in session.resync_frames()]
    assert (register.session, register.server, register.known) == (session.member_token, b"server-0", Members.of([0]))
    assert register.results == len(results) == limits.CACHED_ROUNDS
    assert [encode(result.aggregate) for result in results] == frames[-limits.CACHED_ROUNDS :]


def test_a_group_is_restored_even_if_a_member_has_no_round_left():
    """The server answers member 1 of the pair and dies; member 1 has no further round, and member 0 still waits."""
    pair = World("pair", 2)
    waiting, done = pair.members
    for number, session in enumerate(pair.members):
        key = session.forward_key("bn")
        pair.send(session, session.contribution(key, rows_of(number)))
    expected = pair.take(done, key)
    pair.restart(b"server-1")
    pair.send(waiting, *waiting.resync_frames(), waiting.contribution(key, rows_of(0), attempt=1))
    pair.heartbeats(done)
    (unknown,) = pair.inboxes.pop(done.member_token)
    assert waiting.on_unsolicited(unknown) == [], "it is about another session"
    pair.read(waiting)
    pair.send(done, *done.on_unsolicited(unknown))
    # Before the aggregate comes the notice that all members have registered.
    *_, answer = pair.inboxes[waiting.member_token]
    pair.send(waiting, waiting.contribution(key, rows_of(0), attempt=2))
    assert pair.inboxes[waiting.member_token][-1] == expected
    assert answer == expected


def test_a_session_ignores_unrelated_messages():
    session = World(n=1).members[0]
    for failure in (Failure("replica_lost", "gone", {}), Failure("unknown_session", "who?", {})):
        assert session.on_unsolicited(encode(failure)) == []
    assert session.on_unsolicited(b"garbage") == []
    assert session.on_unsolicited(encode(Pending(session.forward_key("bn"), 0, "waiting"))) == []


def test_a_member_that_does_not_reconnect_is_lost_in_time():
    world = World()
    world.exchange("bn")
    world.now = 10.0
    world.restart(b"server-1")
    first, second, _ = world.members
    key, *_ = [session.forward_key("bn2") for session in world.members]
    for session in (first, second):
        come_back(world, session, key)
        world.read(session)
    for world.now in np.arange(10.5, 13.5, 0.5):
        world.heartbeats(first, second)
        assert world.dispatcher.tick(world.now) == []
    world.now = 10.0 + limits.SILENCE_SECONDS
    world.deliver(world.dispatcher.tick(world.now))
    for session in (first, second):
        # The answer to the round, and the failure of the job on the heartbeat socket.
        lost, notice = sorted(world.read(session), key=lambda failure: failure.key is None)
        assert (lost.code, lost.key, lost.fields["member"]) == ("replica_lost", key, 2)
        assert (notice.code, notice.key, notice.fields) == ("replica_lost", None, lost.fields)
        assert "rank 2 did not reconnect after the server was restarted" in lost.message
    world.send(first, first.register())
    assert codes(world.read(first)) == ["replica_lost"]


def test_members_with_different_results_of_one_round_break_the_group():
    world, key = restarted()
    first, second, third = world.members
    for session in (first, second):
        come_back(world, session, key)
        world.read(session)
    register, result = map(decode, third.resync_frames())
    other = replace(result.aggregate, values=result.aggregate.values + 1.0)
    world.send(third, encode(register), encode(replace(result, aggregate=other)))
    world.send(third, third.contribution(key, rows_of(2)))
    for session in world.members:
        failure = world.read(session)[-1]
        assert (failure.code, failure.key) == ("conflict", key)
        assert "rank 2 (place 2) received another aggregate than other ranks" in failure.message
        assert failure.fields["member"] == 2


def test_the_rows_of_all_members_prevail_over_a_result_that_differs_from_their_sum(caplog):
    world, key = restarted(min_members=1)
    for session in world.members:
        register, result = map(decode, session.resync_frames())
        other = replace(result.aggregate, key=key, values=result.aggregate.values + 1.0)
        results = (
            [encode(result), encode(Result(session.member_token, other))]
            if session.member.rank == 2
            else [encode(result)]
        )
        world.send(session, encode(replace(register, results=len(results))), *results)
        world.send(session, session.contribution(key, rows_of(session.member.rank)))
    world.now += RECONNECT_SECONDS
    world.deliver(world.dispatcher.tick(world.now))
    assert [world.read(session)[-1].values[0, 0] for session in world.members] == [6.0] * N
    assert "rank 2 (place 2) resent an aggregate that differs from the sum of all rows" in caplog.text


def test_a_resent_result_is_ignored_if_the_server_has_not_been_restarted():
    world = World()
    (frame, *_) = world.exchange("bn")
    other = replace(decode(frame), values=np.full((2, 1), 1e30))
    world.send(world.members[0], encode(Result(world.members[0].member_token, other)))
    world.exchange("bn2")


def test_resent_results_are_dropped_when_no_member_can_need_them():
    world, key = restarted()
    for session in world.members:
        come_back(world, session, key)
    for session in world.members:
        world.read(session)
    (master,) = world.dispatcher._registry.masters.values()
    assert len(master.membership.recovered.results) == 1
    for number in range(limits.CACHED_ROUNDS):
        assert len(master.membership.recovered.results) == int(number < limits.CACHED_ROUNDS - 1)
        world.exchange(f"next {number}")
    assert hash(key._replace(layer="bn")) in master._ended


def test_results_of_another_group_are_refused():
    world, other = World(), World("pair", 1)
    other.exchange("bn")
    (foreign,) = (decode(frame).aggregate for frame in other.members[0].resync_frames()[1:])
    session = world.members[0]
    world.send(session, encode(Result(session.member_token, foreign)))
    assert codes(world.read(session)) == ["protocol"]


def test_a_repeated_contribution_gets_the_missing_ranks():
    world = World()
    session = world.members[1]
    key = session.forward_key("bn")
    world.send(session, session.contribution(key, rows_of(1)))
    assert world.read(session) == []
    world.send(session, session.contribution(key, rows_of(1), attempt=1))
    (pending,) = world.read(session)
    assert pending.key == key
    assert pending.message.endswith("has waited 0 s for rank 0 (place 0), rank 2 (place 2)")


def test_a_lost_member_of_the_same_server_gets_an_error():
    master = MemoryMaster()
    connection = master.connect(0, 1)
    for session in list(master.dispatcher._registry.sessions):
        master.dispatcher._registry.lose(0.0, session, "no sign of life")
    with pytest.raises(ReplicaLost, match=r"rank 0 \(thread 0\) was lost: no sign of life"):
        SlavePipe(connection, "bn").run_slave(rows_of(0))
    connection.close()


def test_members_in_rounds_reconnect_by_themselves():
    """The server answers member 1 and dies; both members continue, with the results of an undisturbed run."""
    undisturbed, master = MemoryMaster(), MemoryMaster()
    deliver = master.channel_pool.deliver

    def deliver_to_one(replies):
        replies = list(replies)
        answers = [isinstance(decode(frame), Aggregate) for _, frame in replies]
        if any(answers) and master.dispatcher.report(0.0)["server"] == SERVER.hex():
            replies = replies[1:]
            master.dispatcher = Dispatcher(b"server-1", 0.0)
        deliver(replies)

    master.channel_pool.deliver = deliver_to_one

    def program(connection):
        rounds = [SlavePipe(connection, layer).run_slave(rows_of(connection.rank)) for layer in ("bn", "bn2")]
        return [aggregate.values.tobytes() for aggregate in rounds]

    expected = run_in_memory(2, program, undisturbed)
    assert run_in_memory(2, program, master) == expected
    assert master.dispatcher.report(0.0)["server"] == b"server-1".hex()
