"""Round trips with and without a viewer attached, in short turns while the same members go on.

The viewer is `statsd-bn view --json`, which asks the server once a second, as every skin of the view does. It starts
once, and is stopped for half of each turn, so turns can be short and many. Every second turn begins with the viewer, so
that what changes slowly falls on both halves alike.
"""

import argparse
import bisect
import json
import math
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from main import _server

import client
from client.lanes.shared_memory import SharedMemoryPipe
from statsd_bn import Rows

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

CHANNELS = 64
LANES = {"server": client.SlavePipe, "memory": SharedMemoryPipe}

# Until members, or a viewer, have started.
START_SECONDS = 4.0

# How many standard deviations hold 95 % of a normal distribution.
DEVIATIONS = 1.96

# When each round ended, in order, and how long it took.
Rounds = tuple[list[float], list[float]]
Span = tuple[float, float]


def main() -> None:
    """Measures each lane with each number of members, and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lanes", nargs="+", choices=tuple(LANES), default=list(LANES))
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn, half of it with the viewer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [
        measure(lane, members, options.turns, options.seconds / 2)
        for lane in options.lanes
        for members in options.members
        if lane == "server" or members > 1  # a lone member has nobody to share memory with
    ]
    if options.json:
        print(json.dumps(found, indent=2))
        return
    heading = "with / without, median of turns (95 %)"
    print(f"{'lane':>7} {'members':>7} {'without µs':>10} {'with µs':>8} {heading:>40} {'rounds a second':>24}")
    for row in found:
        ratio, rate = (_in_words(row[name]) for name in ("ratio", "rate"))
        print(
            f"{row['lane']:>7} {row['members']:>7} {row['without']:>10.1f} {row['with']:>8.1f} {ratio:>40} {rate:>24}"
        )


def measure(lane: str, members: int, turns: int, seconds: float) -> dict[str, Any]:
    """Returns the median microseconds of a round without and with a viewer, and the ratios of both and of rates."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _server("ipc", folder) as endpoint:
        queue: Queue[Rounds] = spawn.Queue()
        over = spawn.Event()
        processes = [
            spawn.Process(target=_member, args=(lane, rank, members, endpoint, over, queue)) for rank in range(members)
        ]
        for process in processes:
            process.start()
        time.sleep(START_SECONDS)
        with _viewer(endpoint) as viewer:
            spans = [_turn(viewer, seconds, begins_viewed=bool(turn % 2)) for turn in range(turns)]
        over.set()
        found = [queue.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
    alone, beside = ([_within(found, turn[half]) for turn in spans] for half in (0, 1))
    return {
        "lane": lane,
        "members": members,
        "without": 1e6 * statistics.median(map(statistics.median, alone)),
        "with": 1e6 * statistics.median(map(statistics.median, beside)),
        "ratio": _ratios(alone, beside, statistics.median),
        "rate": _ratios(alone, beside, len),
    }


@contextmanager
def _viewer(endpoint: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "server", "view", endpoint, "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as viewer:  # noqa: S603 - our own viewer
        try:
            time.sleep(START_SECONDS)
            yield viewer
        finally:
            viewer.kill()


def _turn(viewer: "subprocess.Popen[bytes]", seconds: float, *, begins_viewed: bool) -> tuple[Span, Span]:
    """Returns when nobody looked, and when the viewer did."""
    spans = {}
    for is_viewed in (begins_viewed, not begins_viewed):
        viewer.send_signal(signal.SIGCONT if is_viewed else signal.SIGSTOP)
        began = time.monotonic()
        time.sleep(seconds)
        spans[is_viewed] = (began, time.monotonic())
    return spans[False], spans[True]


def _within(members: list[Rounds], span: Span) -> list[float]:
    """Returns how long the rounds took that ended in this span, of all members."""
    found: list[float] = []
    for ends, seconds in members:
        found += seconds[bisect.bisect_left(ends, span[0]) : bisect.bisect_left(ends, span[1])]
    return found


def _ratios(
    alone: list[list[float]], beside: list[list[float]], figure: Callable[[list[float]], float]
) -> tuple[float, float, float]:
    """Returns the median of the turns' ratios, and between which ratios it lies in 95 % of such runs."""
    ratios = sorted(figure(two) / figure(one) for one, two in zip(alone, beside, strict=True))
    around = math.ceil(DEVIATIONS * math.sqrt(len(ratios)) / 2)
    middle = len(ratios) // 2
    return statistics.median(ratios), ratios[max(middle - around, 0)], ratios[min(middle + around, len(ratios) - 1)]


def _in_words(ratio: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def _member(lane: str, rank: int, members: int, endpoint: str, over: "Event", queue: "Queue[Rounds]") -> None:
    torch.set_num_threads(1)
    rows = Rows((1,), np.ones((1, 2, CHANNELS)))
    # All have to stop at the same round, so once in a while they ask one another.
    flag = Rows((1,), np.zeros((1, 2, 1)))
    ends: list[float] = []
    seconds: list[float] = []
    with client.connect(
        endpoint, rank=rank, world_size=members, lane="zeromq" if lane == "server" else "shared_memory"
    ) as connection:
        pipe, last = LANES[lane](connection, "bn"), LANES[lane](connection, "end")
        while True:
            for _ in range(100):
                began = time.monotonic()
                pipe.run_slave(rows)
                ended = time.monotonic()
                ends.append(ended)
                seconds.append(ended - began)
            flag.values[:] = over.is_set()
            if last.run_slave(flag).values.any():
                break
    queue.put((ends, seconds))


if __name__ == "__main__":
    main()
