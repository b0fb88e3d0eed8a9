"""Round trip: one contribution to the aggregate of all, beside a gloo all_reduce and a bare ZeroMQ echo.

All three move the same vector of 2 x channels float64 between the same number of processes. They take turns in one
run, a block of rounds each, so that what else the machine does falls on all alike; the claim is the ratio of
medians, not a time.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import zmq

import client
from statsd_bn import Rows

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

BLOCKS = 10
WARM_UP = 50

Results = dict[str, list[float]]


def main() -> None:
    """Measures every combination and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 256, 2048])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        measure(replicas, channels, options.rounds, options.transport)
        for replicas in options.replicas
        for channels in options.channels
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'replicas':>8} {'channels':>8} {'ours µs':>9} {'p99 µs':>9} {'/ echo':>7} {'/ gloo':>7}")
    for row in rows:
        print(
            f"{row['replicas']:>8} {row['channels']:>8} {row['ours']:>9.0f} {row['ours_p99']:>9.0f} "
            f"{row['ours'] / row['echo']:>7.2f} {row['ours'] / row['gloo']:>7.2f}"
        )


def measure(replicas: int, channels: int, rounds: int, transport: str) -> dict[str, Any]:
    """Returns median and p99 in microseconds of each way, for one combination."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        _server(transport, folder) as endpoint,
        _echo(transport, folder) as echo,
    ):
        queue: Queue[Results] = spawn.Queue()
        members = [
            spawn.Process(target=_member, args=(rank, replicas, channels, rounds, endpoint, echo, folder, queue))
            for rank in range(replicas)
        ]
        for member in members:
            member.start()
        found = [queue.get(timeout=300) for _ in members]
        for member in members:
            member.join()
    row: dict[str, Any] = {"replicas": replicas, "channels": channels, "transport": transport}
    for way in ("ours", "gloo", "echo"):
        times = sorted(seconds * 1e6 for result in found for seconds in result[way])
        row[way] = statistics.median(times)
        row[f"{way}_p99"] = times[int(len(times) * 0.99)]
    return row


def _member(
    rank: int, replicas: int, channels: int, rounds: int, endpoint: str, echo: str, folder: str, queue: "Queue[Results]"
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), replicas)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas)
    vector = torch.ones(2 * channels, dtype=torch.float64)
    rows = Rows((1,), np.ones((1, 2, channels)))
    payload = bytes(16 * channels)
    with (
        client.connect(endpoint, member=rank, world_size=replicas) as connection,
        zmq.Context() as context,
        context.socket(zmq.REQ) as request,
    ):
        request.connect(echo)
        pipe = client.SlavePipe(connection, "bn")

        def ask() -> None:
            request.send(payload)
            request.recv()

        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: pipe.run_slave(rows),
            "gloo": lambda: dist.all_reduce(vector),
            "echo": ask,
        }
        times: Results = {way: [] for way in ways}
        for block in range(BLOCKS + 1):
            for way, run in ways.items():
                dist.barrier()
                # The echo is the floor of one socket, so one member at a time asks for it.
                if way != "echo" or rank == 0:
                    size = WARM_UP if block == 0 else rounds // BLOCKS
                    measured = [_timed(run) for _ in range(size)]
                    times[way] += measured if block else []
    dist.destroy_process_group()
    queue.put(times)


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@contextmanager
def _server(transport: str, folder: str) -> Iterator[str]:
    bind = f"ipc://{folder}/server" if transport == "ipc" else "tcp://127.0.0.1:*"
    arguments = [sys.executable, "-m", "server", "--bind", bind, "--log-level", "error"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own server
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@contextmanager
def _echo(transport: str, folder: str) -> Iterator[str]:
    spawn = multiprocessing.get_context("spawn")
    queue: Queue[str] = spawn.Queue()
    bind = f"ipc://{folder}/echo" if transport == "ipc" else "tcp://127.0.0.1:*"
    process = spawn.Process(target=_serve_echo, args=(bind, queue), daemon=True)
    process.start()
    try:
        yield queue.get(timeout=60)
    finally:
        process.terminate()
        process.join()


def _serve_echo(bind: str, queue: "Queue[str]") -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as reply:
        reply.bind(bind)
        queue.put(reply.getsockopt_string(zmq.LAST_ENDPOINT))
        while True:
            reply.send(reply.recv())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
