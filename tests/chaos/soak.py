"""Rounds in shared memory by the million, while the server and ranks are killed; `scripts/chaos soak` runs it.

Each aggregate is checked to the bit. At the end all ranks are killed at once, and none of the memory may be left.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

# Small rows in many processes: more threads than cores only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from chaos.chaos_world import Finding, Server, require
from programs import soak_programs
from programs.soak_programs import Report
from support import starter
from support.starter import STARTER

# The longest time between two kills of the server, and from a job's first rounds to the kill of a rank.
KILL_SECONDS, RANK_SECONDS = 10.0, 60.0

# How long the members may make no progress.
STUCK_SECONDS = 120.0

# More rounds than a job ever has, and enough rounds to show that members use shared memory.
ENDLESS, FEW = 10**9, 200

# The folder of named shared memory, and this process's descriptors.
SHARED, DESCRIPTORS = Path("/dev/shm"), Path("/proc/self/fd")  # noqa: S108 - nothing is written there

# Name of the memory in a process's maps.
MEMORY = "/memfd:statsd_bn"


class Members:
    def __init__(self, endpoint: str, job: str, size: int, rounds: int) -> None:
        self.progress = [STARTER.RawValue("q", 0) for _ in range(size)]
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank, done in enumerate(self.progress):
            ours, theirs = STARTER.Pipe()
            arguments = (endpoint, job, rank, size, rounds, theirs, done)
            self._processes.append(STARTER.Process(target=soak_programs.soak, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def have_reported(self) -> bool:
        return all(pipe.poll() for pipe in self._pipes)

    def reports(self, killed: int | None = None) -> list[Report]:
        pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank != killed]
        reports = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            with suppress(OSError):  # a rank that failed has exited
                pipe.send(None)
        return reports

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(60)
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def wait_until(self, condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        before, since = [-1], time.monotonic()
        while not condition():
            meanwhile()
            done = [each.value for each in self.progress]
            if done != before:
                before, since = done, time.monotonic()
            require(time.monotonic() - since < STUCK_SECONDS, f"no rank gets further than rounds {done}")
            time.sleep(0.02)


@dataclass
class Soaked:
    rounds: int = 0  # of each rank
    in_memory: int = 0  # of each rank in the last job, without the server
    over_server: int = 0  # of each rank, repeated over the server
    server_kills: int = 0
    rank_kills: int = 0


class _ServerKills:
    def __init__(self, server: Server, seconds: float, chance: random.Random) -> None:
        self.server, self.seconds, self.chance, self.number = server, seconds, chance, 0
        self._due = time.monotonic() + chance.uniform(0, seconds)

    def __call__(self) -> None:
        if time.monotonic() >= self._due:
            self.server.restart()
            self.number += 1
            self._due = time.monotonic() + self.chance.uniform(0, self.seconds)


def soak(size: int, rounds: int, kill_seconds: float, rank_seconds: float, chance: random.Random) -> Soaked:
    """Runs rounds of `size` ranks, in a new job after each kill of a rank, until each rank has had `rounds`."""
    soaked = Soaked()
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), f"ipc://{folder}/server") as server:
        kill_server = _ServerKills(server, kill_seconds, chance)
        while soaked.rounds < rounds:
            job = f"soak {soaked.rank_kills}"
            with Members(server.endpoint, job, size, rounds - soaked.rounds) as members:
                _run_job(members, chance.uniform(0, rank_seconds), chance.randrange(size), kill_server, soaked)
        soaked.server_kills = kill_server.number
    return soaked


def _run_job(members: Members, seconds: float, rank: int, kill_server: Callable[[], None], soaked: Soaked) -> None:
    """Runs a job until its ranks have finished, or until `rank` is killed some seconds after its first rounds."""
    members.wait_until(lambda: members.have_reported or min(each.value for each in members.progress) > 0)
    due = time.monotonic() + seconds
    members.wait_until(lambda: members.have_reported or time.monotonic() >= due, kill_server)
    killed = None if members.have_reported else rank
    if killed is not None:
        os.kill(members.pids[killed], signal.SIGKILL)
        soaked.rank_kills += 1
        members.wait_until(lambda: members.have_reported)
    reports = members.reports(killed)
    loss = f"ReplicaLost: rank {killed} "
    wrong = [one for one in reports if one.why and not (killed is not None and one.why.startswith(loss))]
    require(not wrong, f"after the kill of rank {killed}: {wrong}")
    soaked.rounds += min(one.rounds for one in reports)
    soaked.in_memory = min(one.in_memory for one in reports)
    soaked.over_server += min(one.over_server for one in reports)


def kill_all(size: int) -> int:
    """Kills members during their rounds and checks that their shared memory is gone; returns their number."""
    STARTER.RawValue("q", 0)  # the first RawValue opens a file that stays open
    in_files = set(SHARED.iterdir())
    descriptors = len(list(DESCRIPTORS.iterdir()))
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder), f"ipc://{folder}/server") as server,
        Members(server.endpoint, "killed", size, ENDLESS) as members,
    ):
        members.wait_until(lambda: min(each.value for each in members.progress) >= FEW)
        memories = [memory for pid in members.pids for memory in memories_of(pid)]
        for pid in members.pids:
            os.kill(pid, signal.SIGKILL)
    found = len(memories) == size and len(set(memories)) == 1
    require(found, f"expected one memory, the same for {size} members, got {memories}")
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    holders = [pid for pid in pids if memories_of(pid) & set(memories)]
    require(not holders, f"processes {holders} have the memory still")
    left = [path for path in set(SHARED.iterdir()) - in_files if "statsd" in path.name]
    require(not left, f"files were left behind: {left}")
    require(len(list(DESCRIPTORS.iterdir())) <= descriptors, "this process has more descriptors")
    return len(memories)


def memories_of(pid: int) -> set[str]:
    """The inodes of the shared memory in a process's maps and descriptors."""
    found = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if MEMORY in line:
                found.add(line.split()[4])
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if MEMORY in str(descriptor.readlink()):
                found.add(str(descriptor.stat().st_ino))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos soak", description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=1_000_000, help="for each number of members")
    parser.add_argument("--kill-seconds", type=float, default=KILL_SECONDS, help="most between kills of the server")
    parser.add_argument("--rank-seconds", type=float, default=RANK_SECONDS, help="most until a rank is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    options = parser.parse_args(arguments)
    if min(options.members) < 2:
        parser.error(f"--members: expected 2 at least, got {min(options.members)}")
    starter.warm_up()
    findings = 0
    for size in options.members:
        started = time.monotonic()
        try:
            soaked = soak(size, options.rounds, options.kill_seconds, options.rank_seconds, random.Random(options.seed))
            left = kill_all(size)
        except Finding as finding:
            findings += 1
            print(f"{size} ranks: {finding}", file=sys.stderr, flush=True)
            continue
        print(
            f"{size} ranks: {soaked.rounds} rounds each in {time.monotonic() - started:.0f} s, {soaked.in_memory} of "
            f"the last job's without the server, {soaked.over_server} repeated over the server, "
            f"{soaked.server_kills} kills of the server, {soaked.rank_kills} of a rank; all bits right; "
            f"no memory left of {left} killed ranks",
            flush=True,
        )
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
