"""Round trips with and without a viewer attached, in turns while the same members go on.

The viewer is `statsd-bn view --json`, which asks the server once a second, as every skin of the view does.
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

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

# When a round ended, and how long it took.
Rounds = list[tuple[float, float]]


def main() -> None:
    """Measures each lane with each number of members, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn, half of it with the viewer")
    options = parser.parse_args()
    print(f"{'lane':>7} {'members':>7} {'without µs':>10} {'with µs':>8} {'with / without, median of turns':>32}")
    for lane in LANES:
        for members in options.members:
            if lane == "memory" and members == 1:  # which has nobody to share it with
                continue
            without, beside = measure(lane, members, options.turns, options.seconds / 2)
            ratio = statistics.median(one / other for one, other in zip(beside, without, strict=True))
            shown = (statistics.median(without), statistics.median(beside))
            print(f"{lane:>7} {members:>7} {shown[0]:>10.0f} {shown[1]:>8.0f} {ratio:>32.3f}")


def measure(lane: str, members: int, turns: int, seconds: float) -> tuple[list[float], list[float]]:
    """Returns the median microseconds of a round in each turn: without a viewer, and with one."""
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
        spans = [_turn(endpoint, seconds) for _ in range(turns)]
        over.set()
        rounds = [one for _ in processes for one in queue.get(timeout=60)]
        for process in processes:
            process.join()
    found = [[_median(rounds, span) for span in turn] for turn in spans]
    return [without for without, _ in found], [beside for _, beside in found]


def _turn(endpoint: str, seconds: float) -> tuple[tuple[float, float], tuple[float, float]]:
    without = _span(seconds)
    command = [sys.executable, "-m", "server", "view", endpoint, "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as viewer:  # noqa: S603 - our own viewer
        time.sleep(START_SECONDS)
        beside = _span(seconds)
        viewer.kill()
    return without, beside


def _span(seconds: float) -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(seconds)
    return began, time.monotonic()


def _median(rounds: Rounds, span: tuple[float, float]) -> float:
    return 1e6 * statistics.median(seconds for ended, seconds in rounds if span[0] <= ended < span[1])


def _member(lane: str, rank: int, members: int, endpoint: str, over: "Event", queue: "Queue[Rounds]") -> None:
    torch.set_num_threads(1)
    rows = Rows((1,), np.ones((1, 2, CHANNELS)))
    # All have to stop at the same round, so once in a while they ask one another.
    flag = Rows((1,), np.zeros((1, 2, 1)))
    found: Rounds = []
    with client.connect(
        endpoint, rank=rank, world_size=members, lane="zeromq" if lane == "server" else "shared_memory"
    ) as connection:
        pipe, ends = LANES[lane](connection, "bn"), LANES[lane](connection, "end")
        while True:
            for _ in range(100):
                began = time.monotonic()
                pipe.run_slave(rows)
                ended = time.monotonic()
                found.append((ended, ended - began))
            flag.values[:] = over.is_set()
            if ends.run_slave(flag).values.any():
                break
    queue.put(found)


if __name__ == "__main__":
    main()
