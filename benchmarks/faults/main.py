"""Faults: seconds until every rank has the error, or the next round, after a rank or the server fails.

- killed, frozen: three ranks; two wait in a round while the third gets SIGKILL or SIGSTOP. The time runs from the
  signal until both survivors have raised `ReplicaLost`.
- mismatch: four ranks; after three steps the last rank calls its first two layers in the opposite order. The time runs
  from the moment when all ranks have started that step until all have raised `RoundMismatch`.
- restart: two ranks exchange without a pause; the server gets SIGKILL and is started again. The time runs from the new
  server's `listening on` until both ranks have completed a round.

The server listens on a Unix socket. Each repetition of killed, frozen and mismatch is a new job.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe

import numpy as np
import torch
from torch import nn

import client
from server.network.service import TICK_SECONDS
from statsd_bn import Rows
from statsd_bn.errors import ReplicaLost, RoundMismatch
from statsd_bn.limits import HEARTBEAT_SECONDS

ANSWER_SECONDS = 60.0
UP_SECONDS = 0.5
OUTAGE_SECONDS = 0.02
CHANNELS = 64
STEPS = 3


def main() -> None:
    """Measures and prints a line for each fault, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {fault: FAULTS[fault](options.repetitions) for fault in options.faults}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'':8} {'median s':>9} {'worst s':>9}")
    for fault, seconds in found.items():
        print(f"{fault:8} {statistics.median(seconds):>9.2f} {max(seconds):>9.2f}")


def deaths(number: signal.Signals, repetitions: int) -> list[float]:
    """Returns the seconds from the signal until all survivors have raised, of each repetition."""
    with _socket() as endpoint, _server(endpoint):
        return [_death(endpoint, f"{number.name} {each}", number) for each in range(repetitions)]


def _death(endpoint: str, job: str, number: signal.Signals) -> float:
    with _ranks(3, _wait_for_a_dead_rank, endpoint, job) as ranks:
        *survivors, (victim, of_victim) = ranks
        for pipe in (of_victim, *(pipe for _, pipe in survivors)):
            _receive(pipe)
        for _, pipe in survivors:
            pipe.send("exchange")
        # At a random moment between two heartbeats.
        time.sleep(1.0 + HEARTBEAT_SECONDS * np.random.default_rng().random())
        started = time.monotonic()
        os.kill(victim, number)
        return max(_receive(pipe) for _, pipe in survivors) - started


def _wait_for_a_dead_rank(pipe: Pipe, endpoint: str, job: str, rank: int, ranks: int) -> None:
    with client.connect(endpoint, job=job, rank=rank, world_size=ranks) as connection:
        slave = client.SlavePipe(connection, "bn")
        slave.run_slave(_rows())
        pipe.send(time.monotonic())
        pipe.recv()
        try:
            slave.run_slave(_rows())
        except ReplicaLost:
            pipe.send(time.monotonic())  # this clock is the same in all processes of a machine


def mismatches(repetitions: int) -> list[float]:
    """Returns the seconds from the step that differs until all ranks have raised, of each repetition."""
    with _socket() as endpoint, _server(endpoint):
        found = []
        for each in range(repetitions):
            # Spread over the interval at which the server searches for mismatches.
            time.sleep(TICK_SECONDS * each / repetitions)
            with _ranks(4, _call_layers_in_another_order, endpoint, f"mismatch {each}") as ranks:
                started = max(_receive(pipe) for _, pipe in ranks)
                found.append(max(_receive(pipe) for _, pipe in ranks) - started)
        return found


def _call_layers_in_another_order(pipe: Pipe, endpoint: str, job: str, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    layers = client.convert_model(nn.ModuleList(nn.BatchNorm1d(CHANNELS) for _ in range(3)))
    with client.connect(endpoint, job=job, rank=rank, world_size=ranks):
        for _ in range(STEPS):
            _step(layers, (0, 1, 2))
        pipe.send(time.monotonic())
        try:
            _step(layers, (1, 0, 2) if rank == ranks - 1 else (0, 1, 2))
        except RoundMismatch:
            pipe.send(time.monotonic())


def _step(layers: nn.ModuleList, order: Sequence[int]) -> None:
    output = torch.randn(8, CHANNELS, requires_grad=True)
    for place in order:
        output = layers[place](output)
    (output**2).sum().backward()


def restarts(repetitions: int) -> list[float]:
    """Returns the seconds from `listening on` until all ranks have completed a round, of each restart."""
    with _socket() as endpoint, _ranks(2, _exchange_without_pause, endpoint, "restart") as ranks:
        pipes = [pipe for _, pipe in ranks]
        _restart(endpoint, pipes)  # the first start includes the start of the ranks
        return [_restart(endpoint, pipes) for _ in range(repetitions)]


def _restart(endpoint: str, pipes: list[Pipe]) -> float:
    began = time.monotonic()
    with _server(endpoint) as listening:
        ends = []
        for pipe in pipes:
            while (end := _receive(pipe)) < began:  # an earlier slow round
                pass
            ends.append(end)
        time.sleep(UP_SECONDS)
    return round(max(ends) - listening, 3)


def _exchange_without_pause(pipe: Pipe, endpoint: str, job: str, rank: int, ranks: int) -> None:
    slave = client.SlavePipe(client.connect(endpoint, job=job, rank=rank, world_size=ranks, round_timeout=60.0), "bn")
    last = 0.0
    while True:
        slave.run_slave(_rows())
        if (now := time.monotonic()) - last > OUTAGE_SECONDS:  # sending the time of each round would fill the pipe
            pipe.send(now)
        last = now


def _rows() -> Rows:
    return Rows((1,), np.ones((1, 2, CHANNELS)))


@contextmanager
def _ranks(number: int, program: Callable[..., None], endpoint: str, job: str) -> Iterator[list[tuple[int, Pipe]]]:
    """Starts ranks, yields the process id of each and a pipe to it, and kills them afterwards."""
    # A fork server that has loaded `client` forks them within milliseconds; they inherit nothing from this process.
    starter = multiprocessing.get_context("forkserver")
    starter.set_forkserver_preload(["client"])
    pairs = [starter.Pipe() for _ in range(number)]
    processes = [
        starter.Process(target=program, args=(theirs, endpoint, job, rank, number))
        for rank, (_, theirs) in enumerate(pairs)
    ]
    try:
        for process in processes:
            process.start()
        yield [(process.pid or 0, ours) for process, (ours, _) in zip(processes, pairs, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Pipe) -> float:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError(f"a rank did not answer within {ANSWER_SECONDS:g} s")
    received: float = pipe.recv()
    return received


@contextmanager
def _socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{folder}/server"


@contextmanager
def _server(endpoint: str) -> Iterator[float]:
    """Runs a server, yields the time when it began to listen, and kills it afterwards."""
    arguments = [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own server
        if process.stdout is None or not process.stdout.readline():
            raise SystemExit("the server did not start")
        try:
            yield time.monotonic()
        finally:
            process.kill()


FAULTS: dict[str, Callable[[int], list[float]]] = {
    "killed": partial(deaths, signal.SIGKILL),
    "frozen": partial(deaths, signal.SIGSTOP),
    "mismatch": mismatches,
    "restart": restarts,
}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
