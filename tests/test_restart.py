"""A server that is killed and started again loses nothing: the run ends with the bits of an undisturbed one."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import restart_programs
from client.groups import Group
from client.session import Member, Session
from memory_members import SERVER, MemoryMaster
from memory_members import run_members as run_in_memory
from server.dispatcher import Dispatcher
from statsd_bn.errors import RegistrationRefused, UnknownSession
from statsd_bn.messages import BACKWARD, Aggregate, Pending, Rows
from statsd_bn.wire import decode

# A step takes 30 ms and needs the server, which is up for 0.3 s at most before each kill: so no kill comes too late.
STEPS = 150
PAUSE_SECONDS = 0.01
KILLS = 8


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/server"


@pytest.fixture
def servers(endpoint):
    """Starts servers on one endpoint, one after the other."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error"],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline().startswith("listening on ")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


def run_members(pool, endpoint, job, n):
    return [pool.submit(restart_programs.train, endpoint, job, member, n, STEPS, PAUSE_SECONDS) for member in range(n)]


@pytest.mark.parametrize("seed", [0, 1])
def test_kills_at_random_moments_change_no_bit(pool, servers, endpoint, seed):
    server = servers()
    undisturbed = [future.result(timeout=60) for future in run_members(pool, endpoint, "undisturbed", 3)]
    chance = random.Random(seed)
    futures = run_members(pool, endpoint, "killed", 3)
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.05, 0.3))
        server.send_signal(signal.SIGKILL)
        server.wait(timeout=10)
        server = servers()
    assert [future.exception() for future in futures if future.done()] == [], "the kills came while it trained"
    assert [future.result(timeout=60) for future in futures] == undisturbed


# The same without processes: bytes go in, bytes come out.

N = 3


class World:
    """Members that speak with a master, which may forget everything."""

    def __init__(self):
        self.members = [
            Session(bytes([number]) * 8, Member("job", "world", 0, number, N, 60.0, f"place {number}"))
            for number in range(N)
        ]
        self.restart(b"server-0")
        for session in self.members:
            self.say(session, session.register())

    def restart(self, server):
        self.dispatcher = Dispatcher(server, 0.0)

    def say(self, session, frame):
        """Returns what this session is answered; the others read theirs later."""
        peer = session.token
        answers = [answer for to, answer in self.dispatcher.receive(0.0, peer, frame) if to == peer]
        for answer in answers:
            session.registered(answer) if self.is_registered(answer) else None
        return [decode(answer) for answer in answers]

    @staticmethod
    def is_registered(answer):
        return type(decode(answer)).__name__ == "Registered"


def rows_of(number, value=1.0):
    return Rows((1,), np.full((1, 2, 1), value * (number + 1)))


def test_a_round_that_one_member_had_an_answer_to_and_another_not_is_taken_up_again():
    """The old master answered member 0 and died before it answered the others."""
    world = World()
    keys = [session.forward_key("bn") for session in world.members]
    for number, session in enumerate(world.members):
        answers = world.say(session, session.contribution(keys[number], rows_of(number)))
    (expected,) = answers
    ahead = world.members[0]
    following = ahead.forward_key("bn2")
    world.restart(b"server-1")
    frames = {0: ahead.contribution(following, rows_of(0, 7.0))}
    frames |= {n: world.members[n].contribution(keys[n], rows_of(n), attempt=1) for n in (1, 2)}
    for number, session in enumerate(world.members):
        (failure,) = world.say(session, frames[number])
        assert (failure.code, failure.fields["server"]) == ("unknown_session", b"server-1".hex())
    for session in world.members:
        world.say(session, session.register())
    for frame in ahead.replay():
        assert world.say(ahead, frame) == []
    assert isinstance(world.say(ahead, ahead.contribution(following, rows_of(0, 7.0), attempt=1))[0], Pending)
    world.say(world.members[1], frames[1])
    (answer,) = world.say(world.members[2], frames[2])
    assert isinstance(answer, Aggregate)
    assert answer.values.tobytes() == expected.values.tobytes()


def test_a_round_of_replays_only_is_answered_to_nobody_and_does_not_time_out():
    world = World()
    session = world.members[0]
    session.contribution(session.forward_key("bn"), rows_of(0))
    for frame in session.replay():
        assert world.say(session, frame) == []
    assert world.dispatcher.tick(1e6) == []
    assert world.dispatcher.report(1e6)["groups"][0]["waiting"] == []


def test_only_the_latest_rounds_are_replayed_and_in_order():
    session = Session(b"session0", Member("job", "world", 0, 0, 1, 60.0, "here"))
    keys = [session.forward_key(f"bn{number}") for number in range(20)]
    for key in keys:
        session.contribution(key, rows_of(0))
        session.contribution(key, rows_of(0), attempt=1)
    replayed = [decode(frame) for frame in session.replay()]
    assert [message.key for message in replayed] == keys[-8:]
    assert {(message.waits, message.attempt) for message in replayed} == {(0, 1)}


def test_a_contribution_that_is_sent_again_is_told_whom_the_round_waits_for():
    world = World()
    session = world.members[1]
    key = session.forward_key("bn")
    assert world.say(session, session.contribution(key, rows_of(1))) == []
    (pending,) = world.say(session, session.contribution(key, rows_of(1), attempt=1))
    assert pending.key == key
    assert pending.message.endswith("waiting since 0 s for member 0 (place 0), member 2 (place 2)")


def test_a_newcomer_cannot_be_among_members_that_are_far_into_a_run():
    """One member was killed with the server and came back without its weights: an error, not a guess."""
    world = World()
    old = world.members[0]
    key = old.forward_key("bn")
    old.contribution(key, rows_of(0))
    old.contribution(key.__class__(**{**key.fields, "phase": BACKWARD}), rows_of(0))
    old.forward_key("bn")
    world.restart(b"server-1")
    world.say(old, old.register())
    newcomer = Session(b"newcomer", Member("job", "world", 0, 1, N, 60.0, "elsewhere"))
    frames = [frame for _, frame in world.dispatcher.receive(0.0, b"peer", newcomer.register())]
    with pytest.raises(RegistrationRefused, match=r"member 0 \(place 0\) is at step 1, and member 1 \(elsewhere\) has"):
        newcomer.registered(frames[0])


def test_a_member_that_its_own_server_does_not_know_is_told_so():
    """It was taken for lost: to register again and go on would be a guess."""
    master = MemoryMaster()
    connection = master.connect(0, 1)
    for session in list(master.dispatcher._seats):
        master.dispatcher._lose(session, "no sign of life")
    with pytest.raises(UnknownSession, match="taken for lost"):
        connection.exchange("bn", rows_of(0))
    connection.close()


def test_a_group_to_which_one_member_has_no_more_to_say_is_taken_up_again():
    """The master answers member 1 of the pair and dies; member 1 goes on with the world, member 0 still waits."""
    master = MemoryMaster()
    deliver = master.transport.deliver

    def deliver_to_one(replies):
        replies = list(replies)
        answers = [isinstance(decode(frame), Aggregate) for _, frame in replies]
        if any(answers) and master.dispatcher.report(0.0)["server"] == SERVER.hex():
            replies = replies[1:]
            master.dispatcher = Dispatcher(b"server-1", 0.0)
        deliver(replies)

    master.transport.deliver = deliver_to_one

    def program(connection):
        pair = connection.exchange("bn", rows_of(connection.member.member), group=Group("pair", 2))
        world = connection.exchange("bn", rows_of(connection.member.member))
        return pair.values.tobytes(), world.values.tobytes()

    results = run_in_memory(2, program, master)
    assert results[0] == results[1]
    assert master.dispatcher.report(0.0)["server"] == b"server-1".hex()
