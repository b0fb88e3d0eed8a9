"""Rounds in shared memory by the million, while the server is killed again and again; `scripts/chaos soak` runs it.

Each member checks each aggregate to the bit against the sum that it computes itself, and of some rounds also against
the server's. At the end members that are in the middle of their rounds are killed, all at once, and nothing of the
memory may be left anywhere.
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
from pathlib import Path
from typing import Any, Self

# Small rows in many processes: more threads than cores only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from chaos.chaos_world import Finding, Server, require
from programs import soak_programs
from programs.soak_programs import Told
from support import starter
from support.starter import STARTER

# From one kill of the server to the next, at most.
KILL_SECONDS = 10.0

# How long the members may get no further.
STUCK_SECONDS = 120.0

# So many rounds show that members are in memory.
ENDLESS, FEW = 10**9, 200

# Where memory with a name would be, and this process's descriptors.
SHARED, DESCRIPTORS = Path("/dev/shm"), Path("/proc/self/fd")  # noqa: S108 - nothing is written there

# What the memory is called in a process's maps.
MEMORY = "/memfd:statsd_bn"


class Members:
    """Processes that have rounds together; a context manager that lets none of them survive."""

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
        """Their process ids."""
        return [process.pid for process in self._processes]

    @property
    def have_told(self) -> bool:
        """Whether all have ended their rounds, or one has failed."""
        return all(pipe.poll() for pipe in self._pipes)

    def told(self) -> list[Told]:
        """What each says of its rounds."""
        found = [pipe.recv() for pipe in self._pipes]
        for pipe in self._pipes:
            with suppress(OSError):  # one that has failed has ended
                pipe.send(None)
        return found

    def kill(self) -> None:
        """Kills all of them outright, and waits for that."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(60)
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def wait_until(self, condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits as long as they get further."""
        before, since = [-1], time.monotonic()
        while not condition():
            meanwhile()
            done = [each.value for each in self.progress]
            if done != before:
                before, since = done, time.monotonic()
            require(time.monotonic() - since < STUCK_SECONDS, f"nobody gets further than rounds {done}")
            time.sleep(0.02)


def soak(size: int, rounds: int, kill_seconds: float, chance: random.Random) -> tuple[list[Told], int]:
    """Rounds of `size` members; returns what they say, and how often the server was killed."""
    kills = 0
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), f"ipc://{folder}/server") as server:
        due = time.monotonic() + chance.uniform(0, kill_seconds)

        def kill_server() -> None:
            nonlocal due, kills
            if time.monotonic() >= due:
                server.restart()
                kills += 1
                due = time.monotonic() + chance.uniform(0, kill_seconds)

        with Members(server.endpoint, "soak", size, rounds) as members:
            members.wait_until(lambda: members.have_told, kill_server)
            told = members.told()
    wrong = [f"member {rank}: {one.why}" for rank, one in enumerate(told) if one.why or one.rounds != rounds]
    require(not wrong, "; ".join(wrong))
    return told, kills


def kill_all(size: int) -> int:
    """Kills members in the middle of their rounds; returns how many had memory of which nothing may be left."""
    STARTER.RawValue("q", 0)  # the first one opens a file that stays
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
    """The memory that a process shares or could: the inodes, by its maps and its descriptors."""
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
    """Runs all sizes one after the other and prints a line for each; returns 1 if there was a finding, else 0."""
    parser = argparse.ArgumentParser(prog="scripts/chaos soak", description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=1_000_000, help="of each number of members")
    parser.add_argument("--kill-seconds", type=float, default=KILL_SECONDS, help="between kills of the server, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    options = parser.parse_args(arguments)
    if min(options.members) < 2:
        parser.error(f"--members: expected 2 at least, got {min(options.members)}")
    starter.warm_up()
    findings = 0
    for size in options.members:
        started = time.monotonic()
        try:
            told, kills = soak(size, options.rounds, options.kill_seconds, random.Random(options.seed))
            left = kill_all(size)
        except Finding as finding:
            findings += 1
            print(f"{size} members: {finding}", file=sys.stderr, flush=True)
            continue
        print(
            f"{size} members: {options.rounds} rounds each in "
            f"{time.monotonic() - started:.0f} s, {min(one.in_memory for one in told)} of them without the server, "
            f"{told[0].over_server} also by each over it, "
            f"{kills} kills of the server; all bits right; nothing left of {left} killed",
            flush=True,
        )
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
