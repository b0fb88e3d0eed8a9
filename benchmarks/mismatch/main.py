"""Mismatch: how long until all members know that one of them runs its layers in another order.

Members of one job train three layers alike for a few steps, and then the last one takes two layers in another order.
Measured is the time from when the last member has begun that step until the last one has raised `RoundMismatch`.
Every run is a new job of the same processes.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn

import client
from statsd_bn.errors import RoundMismatch

CHANNELS = 64
STEPS = 3

# How often the server looks. A run ends when it has looked; one that began at once would always meet the same moment.
TICK_SECONDS = 0.25


def main() -> None:
    """Measures and prints a line for each number of members, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {members: measure(members, options.runs) for members in options.members}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'members':>8} {'runs':>5} {'median s':>9} {'worst s':>9}")
    for members, seconds in found.items():
        print(f"{members:>8} {len(seconds):>5} {statistics.median(seconds):>9.3f} {max(seconds):>9.3f}")


def measure(members: int, runs: int) -> list[float]:
    """Returns the seconds of each run."""
    spawn = multiprocessing.get_context("spawn")
    with _server() as endpoint, ProcessPoolExecutor(members, mp_context=spawn) as pool:
        found = []
        for run in range(runs):
            time.sleep(TICK_SECONDS * run / runs)
            found.append(_run(pool, endpoint, f"run-{run}", members))
        return found


def _run(pool: ProcessPoolExecutor, endpoint: str, job: str, members: int) -> float:
    futures = [pool.submit(_member, endpoint, job, member, members) for member in range(members)]
    began, told = zip(*(future.result(timeout=120) for future in futures), strict=True)
    return max(told) - max(began)


def _member(endpoint: str, job: str, member: int, members: int) -> tuple[float, float]:
    """Returns when this member began the step and when it knew, on the clock that all processes share."""
    torch.set_num_threads(1)
    layers = client.convert_model(nn.ModuleList(nn.BatchNorm1d(CHANNELS) for _ in range(3)))
    with client.connect(endpoint, job=job, rank=member, world_size=members):
        for _ in range(STEPS):
            _step(layers, (0, 1, 2))
        began = time.monotonic()
        try:
            _step(layers, (1, 0, 2) if member == members - 1 else (0, 1, 2))
        except RoundMismatch:
            return began, time.monotonic()
    raise AssertionError("no mismatch was told")


def _step(layers: nn.ModuleList, order: tuple[int, ...]) -> None:
    output = torch.randn(8, CHANNELS, requires_grad=True)
    for place in order:
        output = layers[place](output)
    (output**2).sum().backward()


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-m", "server", "--bind", f"ipc://{folder}/server", "--log-level", "error"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own server
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            try:
                yield process.stdout.readline().split()[-1]
            finally:
                process.terminate()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
