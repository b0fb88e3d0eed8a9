"""Flood: what garbage against the port costs a job that is under way, and whether it changes a bit of its results.

Four members exchange round after round through one server. In every other block a process floods the same port, with
all it can send: bytes that are no ZeroMQ, frames that are none of ours, contributions of sessions that nobody knows,
and registrations of members of jobs without number. It reads none of the answers.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

import client
from client.conversation.member import Member
from client.conversation.session import Session
from statsd_bn import Rows, limits

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier, Event

MEMBERS = 4
BLOCKS = 8
WARM_UP = 50

# How much of a flood goes out between two looks at whether it is still wanted.
BURST = 200

# A connection that has taken nothing for so long was ended by the server. A flood that does not read is not told.
STUCK_SECONDS = 0.02


def main() -> None:
    """Measures each flood and prints a table, or JSON; fails if a result has changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(flood, options.channels, options.rounds) for flood in options.floods]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        heads = (("flood", 14), ("sent", 9), ("quiet µs", 9), ("flooded µs", 10), ("ratio", 6), ("log lines", 9))
        print(*(f"{head:>{width}}" for head, width in (*heads, ("server MiB", 10))))
        for row in rows:
            ratio = row["flooded"] / row["quiet"]
            print(
                f"{row['flood']:>14} {row['sent']:>9} {row['quiet']:>9.0f} {row['flooded']:>10.0f} {ratio:>6.2f} "
                f"{row['log_lines']:>9} {row['memory'] / 1024:>10.1f}"
            )
    if not all(row["identical"] for row in rows):
        sys.exit("the members were not all given the right results")


def measure(flood: str, channels: int, rounds: int) -> dict[str, Any]:
    """Returns medians of a round in microseconds, in the quiet blocks and in the flooded ones."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _server(folder) as (endpoint, pid):
        queue: Queue[tuple[dict[str, list[float]], str]] = spawn.Queue()
        sent: Queue[int] = spawn.Queue()
        wanted, over, start = spawn.Event(), spawn.Event(), spawn.Barrier(MEMBERS)
        flooder = spawn.Process(target=_flood, args=(flood, endpoint, wanted, over, sent))
        members = [
            spawn.Process(target=_member, args=(rank, channels, rounds, endpoint, start, wanted, queue))
            for rank in range(MEMBERS)
        ]
        for process in (flooder, *members):
            process.start()
        found = [queue.get(timeout=600) for _ in members]
        over.set()
        memory = _resident(pid)
        for process in (flooder, *members):
            process.join()
        digests = {digest for _, digest in found}
        row: dict[str, Any] = {"flood": flood, "sent": sent.get(timeout=10), "memory": memory}
        row["identical"] = digests == {_expected(channels, BLOCKS * (rounds // BLOCKS) + WARM_UP)}
        row["log_lines"] = Path(folder, "log").read_text().count("\n")
    for way in ("quiet", "flooded"):
        row[way] = statistics.median(seconds * 1e6 for times, _ in found for seconds in times[way])
    return row


def _member(
    rank: int,
    channels: int,
    rounds: int,
    endpoint: str,
    start: "Barrier",
    wanted: "Event",
    queue: "Queue[tuple[dict[str, list[float]], str]]",
) -> None:
    times: dict[str, list[float]] = {"quiet": [], "flooded": []}
    digest = hashlib.sha256()
    number = 0
    with client.connect(endpoint, rank=rank, world_size=MEMBERS, lane="zeromq") as connection:
        pipe = client.SlavePipe(connection, "bn")
        for block in range(-1, BLOCKS):
            way = "flooded" if block % 2 else "quiet"
            if start.wait() == 0:
                wanted.set() if way == "flooded" and block >= 0 else wanted.clear()
                time.sleep(0.3)  # for the flood to swell, or what is left of it to run off
            start.wait()
            for _ in range(rounds // BLOCKS if block >= 0 else WARM_UP):
                rows = _rows(rank, number, channels)
                number += 1
                started = time.perf_counter()
                digest.update(pipe.run_slave(rows).values.tobytes())
                if block >= 0:
                    times[way].append(time.perf_counter() - started)
    queue.put((times, digest.hexdigest()))


def _rows(rank: int, number: int, channels: int) -> Rows:
    values = np.random.default_rng(MEMBERS * number + rank).standard_normal((1, 2, channels))
    return Rows((32,), values)


def _expected(channels: int, rounds: int) -> str:
    digest = hashlib.sha256()
    for number in range(rounds):
        total = _rows(0, number, channels).values[0].copy()
        for rank in range(1, MEMBERS):
            total += _rows(rank, number, channels).values[0]
        digest.update(total.tobytes())
    return digest.hexdigest()


def _flood(flood: str, endpoint: str, wanted: "Event", over: "Event", sent: "Queue[int]") -> None:
    number = 0
    with FLOODS[flood](endpoint) as send:
        while not over.is_set():
            if wanted.wait(0.05):
                for _ in range(BURST):
                    number += send(number)
    sent.put(number)


@contextmanager
def _bytes(endpoint: str) -> Iterator[Callable[[int], int]]:
    """A connection each, with bytes that are no ZeroMQ."""
    host, port = endpoint.removeprefix("tcp://").split(":")

    def send(number: int) -> int:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as connection:
            connection.sendall(os.urandom(64) if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
        return 1

    yield send


@contextmanager
def _frames(endpoint: str, make: Callable[[int], bytes]) -> Iterator[Callable[[int], int]]:
    """Frames over one connection, as fast as it takes them; over a new one as soon as it takes no more."""
    with zmq.Context() as context:
        dealer = _dial(context, endpoint)
        took = time.monotonic()

        def send(number: int) -> int:
            nonlocal dealer, took
            try:
                dealer.send(make(number), zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() - took > STUCK_SECONDS:
                    dealer.close()
                    dealer, took = _dial(context, endpoint), time.monotonic()
                time.sleep(0.0001)
                return 0
            took = time.monotonic()
            return 1

        yield send
        dealer.close()


def _dial(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(endpoint)
    return dealer


def _session(number: int) -> Session:
    member = Member(f"job {number}", "world", 0, 0, 2, 600.0, "nowhere")
    return Session(number.to_bytes(limits.TOKEN_BYTES, "big"), member)


def _stranger(number: int) -> bytes:
    session = _session(number)
    return session.contribution(session.forward_key("bn"), Rows((32,), np.ones((1, 2, 256))))


FLOODS: dict[str, Any] = {
    "bytes": _bytes,
    "garbage": lambda endpoint: _frames(endpoint, lambda number: number.to_bytes(8, "big") * 8),
    "strangers": lambda endpoint: _frames(endpoint, _stranger),
    "registrations": lambda endpoint: _frames(endpoint, lambda number: _session(number).register()),
}


@contextmanager
def _server(folder: str) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "server", "--bind", "tcp://127.0.0.1:*"]
    with (
        Path(folder, "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,  # noqa: S603 - our own
    ):
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
