"""Liveness: how long until all survivors know that a member is dead.

Three members of a job wait: two in a round, one before it. That one is killed or frozen, by the operating system, and
the time is taken until both survivors have raised `ReplicaLost`. Each repetition is a new job of new processes, at one
server.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe

import numpy as np

import client
from statsd_bn import Rows
from statsd_bn.errors import ReplicaLost

MEMBERS = 3
ANSWER_SECONDS = 60.0

# What is promised, in seconds.
PROMISED = {signal.SIGKILL: 1.0, signal.SIGSTOP: 5.0}


def main() -> None:
    """Measures both deaths and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with _server() as endpoint:
        found = {
            number.name: [measure(endpoint, f"{number.name} {turn}", number) for turn in range(options.repetitions)]
            for number in PROMISED
        }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'':8} {'median s':>9} {'worst s':>9} {'promised':>9}")
    for number, promised in PROMISED.items():
        times = found[number.name]
        print(f"{number.name:8} {statistics.median(times):>9.2f} {max(times):>9.2f} {promised:>9.0f}")


def measure(endpoint: str, job: str, number: signal.Signals) -> float:
    """Returns the seconds from the signal until all survivors have raised."""
    # New processes from one that has loaded everything: it takes milliseconds, and nothing is inherited from here.
    starter = multiprocessing.get_context("forkserver")
    starter.set_forkserver_preload(["client"])
    pairs = [starter.Pipe() for _ in range(MEMBERS)]
    processes = [
        starter.Process(target=_member, args=(theirs, endpoint, job, member))
        for member, (_, theirs) in enumerate(pairs)
    ]
    try:
        for process in processes:
            process.start()
        *survivors, victim = [pipe for pipe, _ in pairs]
        for pipe in (*survivors, victim):
            _receive(pipe)
        for pipe in survivors:
            pipe.send("exchange")
        # Anywhere in the second between two heartbeats, and in the server's tick.
        time.sleep(1.0 + np.random.default_rng().random())
        started = time.monotonic()
        os.kill(processes[-1].pid or 0, number)
        return max(_receive(pipe) for pipe in survivors) - started
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Pipe) -> float:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError(f"a member did not answer within {ANSWER_SECONDS:g} s")
    told: float = pipe.recv()
    return told


def _member(pipe: Pipe, endpoint: str, job: str, member: int) -> None:
    rows = Rows((1,), np.ones((1, 2, 64)))
    with client.connect(endpoint, job=job, rank=member, world_size=MEMBERS) as connection:
        connection.exchange("bn", rows)
        pipe.send(0.0)
        pipe.recv()
        try:
            connection.exchange("bn", rows)
        except ReplicaLost:
            # One clock for all processes of a machine.
            pipe.send(time.monotonic())


@contextmanager
def _server() -> Iterator[str]:
    arguments = [sys.executable, "-m", "server", "--bind", "tcp://127.0.0.1:*", "--log-level", "error"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own server
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
