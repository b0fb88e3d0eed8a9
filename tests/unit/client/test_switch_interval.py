"""Python's switch interval is short during a round, and unchanged at any other time."""

import sys
import threading

import numpy as np
import pytest

from client.session.round import INTERVAL_SECONDS, SwitchInterval
from client.transports.server import SlavePipe
from statsd_bn import Rows
from statsd_bn.errors import RoundMismatch
from support.memory_members import MemoryMaster, run_members
from support.starter import STARTER


@pytest.fixture(autouse=True)
def usual():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    yield pytest.approx(0.003)
    sys.setswitchinterval(before)


SHORT = pytest.approx(INTERVAL_SECONDS)


@pytest.fixture
def fresh(monkeypatch):
    """A new SwitchInterval, without the rounds of other tests' threads."""
    found = SwitchInterval()
    monkeypatch.setattr("client.session.round.switch_interval", found)
    return found


@pytest.mark.usefixtures("fresh")
def test_a_round_has_the_short_interval_and_leaves_the_usual_one(usual, monkeypatch):
    master = MemoryMaster()
    receive = master.channel_pool._receive
    intervals = []

    def watch(peer, frame):
        intervals.append(sys.getswitchinterval())
        return receive(peer, frame)

    monkeypatch.setattr(master.channel_pool, "_receive", watch)
    with master.connect(0, 1) as connection:
        SlavePipe(connection, "bn").run_slave(Rows((1,), np.ones((1, 2, 3))))
        assert sys.getswitchinterval() == usual
    registration, contribution, goodbye = intervals
    assert (registration, contribution, goodbye) == (usual, SHORT, usual)


@pytest.mark.usefixtures("fresh")
def test_a_round_that_fails_leaves_the_usual_interval(usual):
    def program(connection):
        channels = 2 + connection.rank
        with pytest.raises(RoundMismatch):
            SlavePipe(connection, "bn").run_slave(Rows((1,), np.ones((1, 2, channels))))

    run_members(2, program)
    assert sys.getswitchinterval() == usual


def test_the_interval_stays_short_until_the_last_of_several_rounds_has_ended(usual):
    several = SwitchInterval()
    several.shorten()
    several.shorten()
    several.restore()
    assert sys.getswitchinterval() == SHORT
    several.restore()
    assert sys.getswitchinterval() == usual


def test_an_interval_that_is_shorter_already_stays(fresh):
    sys.setswitchinterval(0.00002)
    fresh.shorten()
    assert sys.getswitchinterval() == pytest.approx(0.00002)
    fresh.restore()
    assert sys.getswitchinterval() == pytest.approx(0.00002)


def test_rounds_that_threads_begin_and_end_at_the_same_time_leave_the_usual_interval(usual):
    many = SwitchInterval()

    def work():
        for _ in range(2000):
            many.shorten()
            many.restore()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == usual


FORK = """
import os, sys
from client.session.round import switch_interval

switch_interval.shorten()
child = os.fork()
if child == 0:
    usual = abs(sys.getswitchinterval() - 0.005) < 1e-6
    switch_interval.shorten()  # would hang on a lock that a thread of the parent held
    switch_interval.restore()
    os._exit(0 if usual and abs(sys.getswitchinterval() - 0.005) < 1e-6 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
def test_a_child_that_is_forked_during_a_round_has_the_usual_interval():
    process = STARTER.Process(target=exec, args=(FORK, {}))
    process.start()
    process.join(100.0)
    assert process.exitcode == 0
