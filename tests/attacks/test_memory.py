"""The memory of a server stays within its account, for all kinds of data."""

import time
from dataclasses import replace

import numpy as np
import pytest

from attacks.crowds import ask_all, crowd, registrations
from attacks.honest import ANY_SLOWDOWN, SLOWDOWN_OF_A_FULL_CORE
from attacks.peers import Peers, job_of
from attacks.servers import accounting
from statsd_bn.messages import Contribution, Failure, StatusRequest
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey
from support.memory_members import wait_until

ACCOUNT = 16 * 2**20

# Eight megabytes.
WIDE = Rows((1,) * 8, np.ones((8, 2, 65_536)))


@pytest.fixture
def server(start):
    # A long silence is allowed, since attackers send nothing more once their messages are stored.
    return start(*accounting(ACCOUNT), "--silence-seconds", "3600", account=ACCOUNT)


@pytest.fixture
def small_server(start):
    return start(*accounting(ACCOUNT // 2), "--silence-seconds", "3600", account=ACCOUNT // 2)


def test_open_rounds_are_counted(small_server, honest_job_beside):
    with honest_job_beside(small_server) as beside, Peers(small_server) as peers, beside.attacked():
        crowd(peers, "bob", groups=8, size=400, rounds=256)
        assert small_server.report()["over_limits"] > 0


def test_unread_answers_are_counted(server, honest_job_beside):
    with honest_job_beside(server) as beside, Peers(server) as peers:
        job = job_of("bob")
        for group in range(8):
            ask_all(peers.open(), registrations(job, group, 512, there=400, place="p" * 200))
        with beside.attacked():
            # Connections with minimal receive buffers, which read nothing.
            deaf = [peers.open(RCVHWM=1, RCVBUF=4096) for _ in range(24)]
            for _ in range(4):
                for peer in deaf:
                    peer.send(*[StatusRequest()] * 16)
                time.sleep(0.5)

            def is_dropped() -> bool:
                # Frequent requests get short answers, so one connection sends requests until its buffers are full.
                deaf[0].send(StatusRequest())
                return server.report()["dropped_answers"] > 0

            wait_until(is_dropped)


def test_all_jobs_together_stay_within_the_account(server, honest_job_beside):
    rows = Rows((1,), np.ones((1, 2, 32_768)))  # half a megabyte
    with honest_job_beside(server) as beside, Peers(server) as peers, beside.attacked():
        for number in range(8):
            job, peer = job_of("bob"), peers.open()
            tokens = [bytes([number, member]) * 4 for member in (0, 1)]
            world = registrations(job, number, 2)
            ask_all(peer, [replace(one, session=tokens[one.member]) for one in world])
            for layer in range(28):
                key = RoundKey(job, f"g{number}", 0, 0, f"layer {layer}", 0, "forward")
                peer.send(Contribution(tokens[0], key, 0, rows))
                time.sleep(0.005)
        assert server.report()["over_limits"] > 0


def test_members_of_groups_that_never_open_are_counted(small_server, honest_job_beside):
    with honest_job_beside(small_server) as beside, Peers(small_server) as peers, beside.attacked():
        refused = 0
        for number in range(25):
            crowd_ = registrations(job_of("bob"), number, 401, there=400, place="h" * 250)
            refused += sum(isinstance(answer, Failure) for answer in ask_all(peers.open(), crowd_))
        assert refused, "the account is full"


def test_a_repeated_reason_is_kept_once(server, honest_job_beside):
    """The same large contribution to a broken group is refused, and decrypted, each time."""
    beside_it = honest_job_beside(server, slowdown=SLOWDOWN_OF_A_FULL_CORE)
    with beside_it as beside, Peers(server) as peers, beside.attacked():
        job, peer = job_of("bob"), peers.open()
        world = registrations(job, 0, 2)
        ask_all(peer, [*world, replace(world[0], epoch=1, session=b"newcomer")])
        wide = Contribution(world[1].session, RoundKey(job, "g0", 0, 0, "bn", 0, "forward"), 1, WIDE)
        answers = [peer.ask(wide) for _ in range(100)]
        assert sum(isinstance(answer, Failure) for answer in answers) >= 90


@pytest.mark.alone  # how much ZeroMQ holds depends on other processes' use of the processor
def test_waiting_large_messages_are_bounded(server, honest_job_beside):
    """The messages arrive over many connections, faster than the server reads them; the honest job may be slow."""
    with honest_job_beside(server, slowdown=ANY_SLOWDOWN) as beside, Peers(server) as peers:
        job = job_of("bob")
        crowd_ = [peers.open(SNDHWM=8) for _ in range(16)]
        world = registrations(job, 0, 2)
        ask_all(crowd_[0], world)
        large = Rows((1,), np.ones((1, 2, 65_536)))  # a megabyte
        message = Contribution(world[0].session, RoundKey(job, "g0", 0, 0, "bn", 0, "forward"), 0, large)
        with beside.attacked():
            for _ in range(64):
                for peer in crowd_:
                    peer.send(message)
                time.sleep(0.01)
