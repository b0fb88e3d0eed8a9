"""The contract of every attack: an honest job of two processes keeps its results, its pace and its server."""

import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest
from bench.quiet import Others

from attacks.peers import job_of
from attacks.servers import BESIDE_ACCOUNT_BYTES, Attacked

# Rows like those of a narrow layer: two vectors of 64 channels. The last channel says whether a member wants to end.
VECTORS, CHANNELS = 2, 64

# Number of different contributions, which a member sends in turn.
DIFFERENT = 32

# Pause between two rounds, in which a model would compute.
PAUSE_SECONDS = 0.002

# Limits of a round and of the start; the wait for the members' results may take twice `DEADLINE`.
DEADLINE = 20.0
START_SECONDS = 60.0

# Length of the quiet phase before each attack, and the least length of an attack. Most attacks are repeated: other work
# of the machine may slow one of them.
QUIET_SECONDS = 0.5
ATTACKS = 3


class Slowdown(NamedTuple):
    median: float
    together: float


# When an attack fills a core, half of the rounds wait for one of its frames, so chance decides whether the median
# includes such a wait.
SLOWDOWN, SLOWDOWN_OF_A_FULL_CORE = Slowdown(2.0, 3.0), Slowdown(math.inf, 3.0)
ANY_SLOWDOWN = Slowdown(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Played:
    rounds: list[tuple[float, float]]  # start and end of each round, by the clock of all processes
    wrong: int  # number of wrong aggregates
    problem: str  # the error that ended the member, or ""


def contributions() -> np.ndarray:
    """Both members' contributions in each turn: shape (turn, member, vectors, channels)."""
    numbers = np.random.default_rng(17).standard_normal((DIFFERENT, 2, VECTORS, CHANNELS)) * 1e3
    numbers[..., -1] = 0.0
    return numbers


def play(endpoint: str, secret: Path | None, job: str, member: int, folder: Path, min_members: int = 0) -> Played:
    """Runs rounds until the file `stop` exists; creates `begun-MEMBER` after the first `DIFFERENT` rounds."""
    import support.without_torch  # noqa: F401, PLC0415 - before the client, and only in the members' processes
    from client.session.channel_pool import ZmqChannelPool  # noqa: PLC0415
    from client.session.connection import Connection  # noqa: PLC0415
    from client.session.protocol.session import Member  # noqa: PLC0415
    from client.transports.server import SlavePipe  # noqa: PLC0415
    from statsd_bn import Rows  # noqa: PLC0415
    from statsd_bn.keys import load_client  # noqa: PLC0415

    rounds: list[tuple[float, float]] = []
    wrong, stop = 0, folder / "stop"
    values = contributions()
    expected = [turn[0] + turn[1] for turn in values]
    who = Member(job, "world", 0, member, 2, DEADLINE, f"honest member {member}", min_members)
    try:
        with Connection(ZmqChannelPool(endpoint, load_client(secret) if secret else None), who) as connection:
            for number in range(10**9):
                turn = number % DIFFERENT
                mine = values[turn, member][None].copy()
                mine[0, 0, -1] = float(stop.exists())
                began = time.monotonic()
                aggregate = SlavePipe(connection, "bn").run_slave(Rows((7,), mine))
                rounds.append((began, time.monotonic()))
                wants_end = float(aggregate.values[0, -1])
                right = expected[turn].copy()
                right[0, -1] = wants_end
                wrong += (aggregate.count, aggregate.values.tobytes()) != (14, right.tobytes())
                if wants_end:
                    break
                if number == DIFFERENT:
                    (folder / f"begun-{member}").touch()
                time.sleep(PAUSE_SECONDS)
    except Exception as error:  # noqa: BLE001 - it is the result
        return Played(rounds, wrong, f"{type(error).__name__}: {error}"[:500])
    return Played(rounds, wrong, "")


@dataclass
class Beside:
    job: str
    folder: Path
    members: list["Future[Played]"]
    phases: list[tuple[float, float, float]] = field(default_factory=list)

    @contextmanager
    def attacked(self) -> Iterator[None]:
        """A quiet phase, then the body of the block as an attack, and a moment after it."""
        quiet = time.monotonic()
        time.sleep(QUIET_SECONDS)
        began = time.monotonic()
        yield
        time.sleep(max(0.1, began + QUIET_SECONDS - time.monotonic()))
        self.phases.append((quiet, began, time.monotonic()))

    def attacks(self, times: int = ATTACKS) -> Iterator[int]:
        """Alternates quiet phases and attacks: the body of a loop over this is an attack."""
        for number in range(times):
            with self.attacked():
                yield number

    def end(self) -> list[Played]:
        """Ends the job and returns what its members have seen."""
        (self.folder / "stop").touch()
        return [member.result(timeout=2 * DEADLINE) for member in self.members]


def lengths(played: list[Played], first: float, last: float) -> list[float]:
    rounds = [each for one in played for each in one.rounds[DIFFERENT:]]
    return [ended - began for began, ended in rounds if began < last and ended > first]


def slowed(played: list[Played], phases: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Slowdown of the median round and of all rounds, relative to the quiet phase before: medians over the attacks."""
    rounds, pauses = [], []
    for quiet, began, ended in phases:
        before, beside = lengths(played, quiet, began), lengths(played, began, ended)
        rounds.append(median(beside or [float("inf")]) / median(before or [float("inf")]))
        pauses.append(len(before) / (began - quiet) * (ended - began) / max(1, len(beside)))
    return (median(rounds), median(pauses)) if phases else (1.0, 1.0)


class Workers:
    """Two processes that run the honest members; all jobs share them, since they take a second to start."""

    def __init__(self) -> None:
        self._pool = _new_pool()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin_again(self) -> None:
        """Replace processes that wait for a former server."""
        for process in list(self._pool._processes.values()):
            process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = _new_pool()

    def begin(self, server: Attacked, folder: Path, min_members: int = 0, tenant: str = "alice") -> Beside:
        job, secret = job_of(tenant), server.secret_of(tenant)
        members = [
            self._pool.submit(play, server.endpoint, secret, job, number, folder, min_members) for number in (0, 1)
        ]
        beside = Beside(job, folder, members)
        expiry = time.monotonic() + START_SECONDS
        while not all((folder / f"begun-{number}").exists() for number in (0, 1)):
            assert time.monotonic() < expiry, "the honest job did not begin"
            assert not any(one.done() for one in members), [one.result() for one in members if one.done()]
            time.sleep(0.005)
        return beside


def _check_alive(server: Attacked) -> None:
    assert not server.ending, f"the server was ended by {server.ending}\n{server.log_text()[-2000:]}"


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))


@contextmanager
def honest_job_beside(
    workers: Workers, server: Attacked, *, slowdown: Slowdown = SLOWDOWN, min_members: int = 0
) -> Iterator[Beside]:
    """Runs the honest job during attacks, and checks the contract afterwards, except for the pace on a busy machine."""
    with Others() as others, TemporaryDirectory() as name:
        beside = workers.begin(server, Path(name), min_members)
        try:
            yield beside
            _check_alive(server)
            played = beside.end()
            _check_alive(server)
        except BaseException:
            workers.begin_again()
            raise
    faults = [one.problem for one in played if one.problem]
    faults += [f"{one.wrong} wrong aggregates" for one in played if one.wrong]
    if not faults:
        faults = [] if others.processors > QUIET else slow_downs(played, beside.phases, slowdown)
    grown = server.highest() - server.settled
    if grown > server.account + BESIDE_ACCOUNT_BYTES:
        faults.append(f"the server's memory grew by {grown / 2**20:.0f} MiB")
    if "Traceback" in server.log_text():
        faults.append(server.log_text()[-2000:])
    assert not faults, "\n".join(faults)
    skip_if_busy(others)


def slow_downs(played: list[Played], phases: list[tuple[float, float, float]], most: Slowdown) -> list[str]:
    rounds, pauses = slowed(played, phases)
    faults = []
    if rounds > most.median:
        faults.append(
            f"a median round takes {rounds:.2f} times as long during the attack, expected at most {most.median:g}"
        )
    if pauses > most.together:  # unlike the median, also covers seconds without a round
        faults.append(f"{pauses:.2f} times fewer rounds are done during the attack, expected at most {most.together:g}")
    return faults


# Processors that other programs may use. If they use more, the pace is not compared.
QUIET = 0.5


def skip_if_busy(others: Others) -> None:
    """Skip a test on a busy machine, after its other assertions passed."""
    if others.processors > QUIET:
        pytest.skip(
            f"times were not compared: other processes used {others.processors:.1f} processors, "
            f"expected at most {QUIET:g}; everything else holds"
        )
