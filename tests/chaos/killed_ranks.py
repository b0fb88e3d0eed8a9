"""Kill ranks by the hundred: neither the server nor a bit of another job may suffer; `scripts/chaos kills` runs it."""

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attacks import servers
from attacks.honest import Workers
from attacks.peers import job_of
from attacks.servers import Attacked
from chaos.chaos_world import require
from client.session.protocol.member import TRANSPORTS
from programs import soak_programs
from support import starter
from support.starter import STARTER

# Concurrent jobs and their ranks, all of which are killed.
JOBS, RANKS = 2, 4

# The longest time from a job's first rounds to its first kill, and between two kills.
ROUNDS_SECONDS, BETWEEN_SECONDS = 0.3, 0.02

# One in this many jobs is killed earlier, while its ranks connect.
WHILE_CONNECTING = 4
CONNECT_SECONDS = 0.5

START_SECONDS = 60.0

# The server finds a rank that was killed before its first message only by its silence.
LOST_SECONDS = 20.0


def kill_ranks(kills: int, *, with_keys: bool, chance: random.Random) -> Counter[str]:
    """Kills ranks of a server on TCP with keys, or on a private Unix socket; returns the kills by transport."""
    killed: Counter[str] = Counter()
    workers = Workers()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bind = "tcp://127.0.0.1:*" if with_keys else f"ipc://{folder}/server"
            with servers.attacked(folder, with_keys=with_keys, bind=bind) as server:
                beside = workers.begin(server, folder)
                while killed.total() < kills:
                    _kill_jobs(server, TRANSPORTS[killed.total() // (JOBS * RANKS) % len(TRANSPORTS)], chance, killed)
                    require(not server.ending, f"the server ended after {killed}: {server.ending}\n{server.log_text()}")
                played = beside.end()
                wrong = [one.problem or f"{one.wrong} wrong aggregates" for one in played if one.problem or one.wrong]
                require(not wrong, f"the honest job was disturbed: {'; '.join(wrong)}")
                require("Traceback" not in server.log_text(), server.log_text())
                _wait_until_all_are_lost(server)
    finally:
        workers.close()
    return killed


def _wait_until_all_are_lost(server: Attacked) -> None:
    expiry = time.monotonic() + LOST_SECONDS
    while groups := server.report("bob")["groups"]:
        require(time.monotonic() < expiry, f"members are left: {groups}")
        time.sleep(0.1)


def _kill_jobs(server: Attacked, transport: str, chance: random.Random, killed: Counter[str]) -> None:
    """Starts jobs, and kills their ranks in any order while they connect or have rounds."""
    flags = [STARTER.RawValue("q", 0) for _ in range(JOBS * RANKS)]
    processes = [
        _start_job(server, job_of("bob"), transport, flags[first : first + RANKS])
        for first in range(0, len(flags), RANKS)
    ]
    ranks = [process for job in processes for process in job]
    try:
        if chance.randrange(WHILE_CONNECTING):
            _wait_for_rounds(flags, ranks)
            time.sleep(chance.uniform(0, ROUNDS_SECONDS))
        else:
            time.sleep(chance.uniform(0, CONNECT_SECONDS))
        for process in chance.sample(ranks, len(ranks)):
            killed[transport] += process.is_alive()
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(chance.uniform(0, BETWEEN_SECONDS))
    finally:
        for process in ranks:
            process.kill()
            process.join(START_SECONDS)
            process.close()


def _start_job(server: Attacked, job: str, transport: str, flags: list[Any]) -> list[Any]:
    """Starts the ranks of a job, each of which sets its number in `flags` to 1 after its first round."""
    secret = server.secret_of("bob")
    given = server.endpoint, str(secret) if secret else None, job
    processes = [
        STARTER.Process(
            target=soak_programs.rounds_without_end, args=(*given, rank, RANKS, transport, one), daemon=True
        )
        for rank, one in enumerate(flags)
    ]
    for process in processes:
        process.start()
    return processes


def _wait_for_rounds(flags: list[Any], ranks: list[Any]) -> None:
    expiry = time.monotonic() + START_SECONDS
    while not all(one.value for one in flags):
        require(time.monotonic() < expiry, "the ranks did not begin")
        require(all(process.is_alive() for process in ranks), "a rank ended before it was killed")
        time.sleep(0.01)


def main(arguments: Sequence[str] | None = None) -> None:
    """Kills ranks on a Unix socket and over TCP with keys, and prints a line for each."""
    parser = argparse.ArgumentParser(prog="scripts/chaos kills", description=__doc__)
    parser.add_argument("kills", type=int, help="number of ranks on each kind of socket")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    options = parser.parse_args(arguments)
    starter.warm_up()
    for where, with_keys in (("ipc", False), ("tcp with keys", True)):
        started = time.monotonic()
        killed = kill_ranks(options.kills, with_keys=with_keys, chance=random.Random(options.seed))
        seconds = time.monotonic() - started
        print(f"{where}: killed {dict(killed)} ranks in {seconds:.0f} s; the server continues", flush=True)


if __name__ == "__main__":
    main()
