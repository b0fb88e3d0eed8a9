"""Time of a round, compared with a gloo all_reduce and a bare ZeroMQ echo.

Rounds and all_reduce add vectors of 2 x channels float64 of the same processes; the echo sends as many bytes from one
process to a server and back. They alternate in blocks, so that other load slows all alike. A round travels over the
server and in shared memory, each in four situations: back to back; after a pause, as the other layers of a training
step cause; with a thread in each member that computes in Python; and with a further process per member that computes.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
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
from client.transports.shared_memory import SharedMemoryPipe
from statsd_bn import Rows

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

BLOCKS = 10
WARM_UP = 50

# Between two rounds of the situation "paused".
PAUSE_SECONDS = 0.005

# Ours over the server ("ours") and in shared memory ("memory"); gloo and the echo are for comparison.
SITUATIONS = ("", " paused", " thread", " process")
WAYS = (*(f"{transport}{situation}" for transport in ("ours", "memory") for situation in SITUATIONS), "gloo", "echo")

# Bytes of a contribution, without its values.
FRAME_BYTES = 80

# The share of `--rounds` that the slow ways run.
SLOW = 0.2

Results = dict[str, list[float]]


def main() -> None:
    """Measures every combination and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 256, 2048])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--transports", nargs="+", choices=("ipc", "tcp"), default=["ipc", "tcp"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        measure(replicas, channels, options.rounds, transport)
        for transport in options.transports
        for replicas in options.replicas
        for channels in options.channels
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'transport':>9} {'replicas':>8} {'channels':>8} {'ours µs':>9} {'p99 µs':>9} {'/ echo':>7} {'/ gloo':>7} "
        f"{'paused / ours':>13} {'thread / ours':>13} {'process / ours':>14}  in memory / over the server: "
        "back to back, paused, thread, process"
    )
    for row in rows:
        print(
            f"{row['transport']:>9} {row['replicas']:>8} {row['channels']:>8} {row['ours']:>9.0f} "
            f"{row['ours_p99']:>9.0f} {row['ours'] / row['echo']:>7.2f} {row['ours'] / row['gloo']:>7.3f} "
            f"{row['ours paused'] / row['ours']:>13.2f} {row['ours thread'] / row['ours']:>13.2f} "
            f"{row['ours process'] / row['ours']:>14.2f}  "
            + " ".join(
                f"{row[way] / row[way.replace('memory', 'ours')]:.2f}" for way in WAYS if way.startswith("memory")
            )
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
        found = [queue.get(timeout=600) for _ in members]
        for member in members:
            member.join()
    row: dict[str, Any] = {"replicas": replicas, "channels": channels, "transport": transport}
    for way in WAYS:
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
    payload = bytes(16 * channels + FRAME_BYTES)
    with (
        client.connect(endpoint, rank=rank, world_size=replicas, transport="shared_memory") as connection,
        zmq.Context() as context,
        context.socket(zmq.REQ) as request,
    ):
        request.connect(echo)
        over_server = client.SlavePipe(connection, "bn")
        # A single member shares memory with no other, so it uses the server here too.
        in_memory = SharedMemoryPipe(connection, "bn") if replicas > 1 else over_server

        def ask() -> None:
            request.send(payload)
            request.recv()

        ways: dict[str, tuple[float, Callable[[int], list[float]]]] = {
            **_ours("ours", lambda: over_server.run_slave(rows)),
            **_ours("memory", lambda: in_memory.run_slave(rows)),
            "gloo": (SLOW, lambda size: [_timed(lambda: dist.all_reduce(vector)) for _ in range(size)]),
            "echo": (1.0, lambda size: [_timed(ask) for _ in range(size)]),
        }
        times: Results = {way: [] for way in ways}
        for block in range(BLOCKS + 1):
            for way, (part, run) in ways.items():
                dist.barrier()
                # The echo is the lower bound of one socket, so only rank 0 uses it.
                if way != "echo" or rank == 0:
                    measured = run(int(part * (rounds // BLOCKS if block else WARM_UP)))
                    times[way] += measured if block else []
    dist.destroy_process_group()
    queue.put(times)


def _ours(transport: str, exchange: Callable[[], Any]) -> dict[str, tuple[float, Callable[[int], list[float]]]]:
    """Returns the situations of one transport: the share of the rounds that each runs, and a function that runs it."""
    return {
        transport: (1.0, lambda size: [_timed(exchange) for _ in range(size)]),
        f"{transport} paused": (SLOW, lambda size: [_timed(exchange) for _ in _pauses(size)]),
        f"{transport} thread": (SLOW, lambda size: _beside_a_busy_thread(exchange, size)),
        f"{transport} process": (SLOW, lambda size: _beside_a_busy_process(exchange, size)),
    }


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _pauses(size: int) -> Iterator[None]:
    for _ in range(size):
        time.sleep(PAUSE_SECONDS)
        yield


def _beside_a_busy_thread(run: Callable[[], Any], size: int) -> list[float]:
    is_over = False

    def compute() -> None:
        while not is_over:
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return [_timed(run) for _ in range(size)]
    finally:
        is_over = True
        thread.join()


def _beside_a_busy_process(run: Callable[[], Any], size: int) -> list[float]:
    arguments = [sys.executable, "-uc", "print()\nwhile True: sum(range(100))"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own loop
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        process.stdout.readline()
        try:
            return [_timed(run) for _ in range(size)]
        finally:
            process.kill()


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
    os.environ["STATSD_BN_INSECURE"] = "1"  # the cost of CURVE is not measured here
    main()
