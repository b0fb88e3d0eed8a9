"""A real server beside floods: a small job keeps its rounds, whatever others send."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq
from bench.quiet import Others

from conftest import Server, running_server
from statsd_bn.messages import Aggregate, Message
from statsd_bn.wire import decode, encode
from support.busy_machine import skip_if_busy
from support.paths import ROOT, TESTS
from support.strategies import contribution, is_probe, key, register

pytestmark = pytest.mark.alone

WAIT_SECONDS = 30.0
ROUNDS = 60
TURNS = 3


def answer(dealer: zmq.Socket) -> Message:
    while True:
        assert dealer.poll(WAIT_SECONDS * 1000), "no answer"
        found = decode(dealer.recv())
        if not is_probe(found):
            return found


class Pair:
    """Two members of an honest job."""

    def __init__(self, stack: ExitStack, endpoint: str) -> None:
        context = stack.enter_context(zmq.Context())
        self._dealers = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(2)]
        self._step = 0
        for member, dealer in enumerate(self._dealers):
            dealer.linger = 0
            dealer.connect(endpoint)
            dealer.send(encode(register(member, job="honest")))
        # Whichever registers first is told twice: once alone, once when the job is complete.
        for dealer in self._dealers:
            while answer(dealer).missing:
                pass

    def round(self) -> float:
        """Takes part in a round; returns how long it took."""
        self._step += 1
        where = key(job="honest", step=self._step)
        started = time.perf_counter()
        for member, dealer in enumerate(self._dealers):
            dealer.send(encode(contribution(member, float(self._step), where)))
        for dealer in self._dealers:
            aggregate = answer(dealer)
            assert isinstance(aggregate, Aggregate)
            assert aggregate.values.item() == 2.0 * self._step
        return time.perf_counter() - started


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack) -> Callable[..., Server]:
    """Servers wait for members that are silent, since those of a `Pair` send no heartbeats."""

    def run(*arguments: str) -> Server:
        options = "--insecure", "--silence-seconds", "3600", *arguments
        return stack.enter_context(running_server(*options, bind="tcp://127.0.0.1:*"))

    return run


def flood(stack: ExitStack, endpoint: str, kind: str, connections: int) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}
    command = ["nice", sys.executable, str(TESTS / "programs" / "flood_program.py"), endpoint, kind, str(connections)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout
    stack.callback(process.stdout.close)
    stack.callback(process.wait, WAIT_SECONDS)
    stack.callback(process.kill)
    assert process.stdout.readline() == "begins\n"
    return process


@pytest.mark.parametrize(("kind", "connections"), [("status", 8), ("members", 8), ("rounds", 1), ("registrations", 4)])
def test_a_small_jobs_rounds_take_at_most_thrice_as_long_beside_a_flood(start, stack, kind, connections):
    server = start()
    pair = Pair(stack, server.endpoint)
    attacker = flood(stack, server.endpoint, kind, connections)
    quiet, beside = [], []
    with Others() as others:
        for _ in range(TURNS):
            # The flood stands still, and what it has sent is worked off by the time of the first rounds.
            attacker.send_signal(signal.SIGSTOP)
            quiet += [pair.round() for _ in range(2 * ROUNDS)][ROUNDS:]
            attacker.send_signal(signal.SIGCONT)
            beside += [pair.round() for _ in range(2 * ROUNDS)][ROUNDS:]
    skip_if_busy(others)
    before, during = statistics.median(quiet), statistics.median(beside)
    assert during <= 3 * before
