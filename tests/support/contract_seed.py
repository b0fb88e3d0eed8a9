"""Servers and second ranks for tests/contract/test_seed_library.py and others, and the programs of those ranks.

Every server listens on a Unix socket in a private folder. A process can only receive importable functions, so the
programs of rank 1 live here and not in the tests.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import client
import client.comm
from statsd_bn import Aggregate, Rows

WAIT_SECONDS = 100.0

# On a busy machine a process may be descheduled for seconds, and must not count as lost.
SILENCE_SECONDS = 60.0

# The contributions of two ranks: counts, and rows of two vectors over three channels, forward and backward. The
# values are binary fractions, so that their sums are exact in any order.
COUNTS = ((4,), (6, 0))
FORWARD = (
    np.array([[[1.0, -2.0, 0.5], [3.0, 4.0, 0.25]]]),
    np.array([[[0.5, 8.0, 1.5], [2.5, 64.0, 1.75]], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]),
)
BACKWARD = (
    np.array([[[0.125, 2.0, -1.0], [1.0, -0.5, 4.0]]]),
    np.array([[[0.375, -2.0, 3.0], [1.0, 0.25, 0.0]], [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]]),
)


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of mode 0700 with a path short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="bn-") as folder:
        yield Path(folder)


def environment(**changed: str) -> dict[str, str]:
    """This process's environment without our variables, except those in `changed`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATSD_BN_")}
    return {**inherited, **changed}


def run(
    *command: str | Path, seconds: float = WAIT_SECONDS, cwd: Path | None = None, **changed: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end in `environment(**changed)`; raises TimeoutExpired after `seconds`."""
    return subprocess.run(
        command, cwd=cwd, env=environment(**changed), capture_output=True, text=True, timeout=seconds, check=False
    )


def run_server_command(*arguments: str | Path, **changed: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m server` with arguments to its end."""
    return run(sys.executable, "-m", "server", *arguments, **changed)


@dataclass(frozen=True)
class RunningServer:
    """A server process, and the endpoint that it has printed."""

    endpoint: str
    process: subprocess.Popen[str]

    def terminate(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_SECONDS)


@contextmanager
def serving(command: Sequence[str | Path], cwd: Path | None = None, **changed: str) -> Iterator[RunningServer]:
    """Runs a server's command, then ends it by SIGTERM unless it has ended; asserts the exit code 0."""
    with subprocess.Popen(
        command, cwd=cwd, env=environment(**changed), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                process.kill()
                raise AssertionError(f"expected `listening on ENDPOINT`, got {line!r}, {process.communicate()[1]}")
            server = RunningServer(line.split()[-1], process)
            yield server
            code = server.terminate() if process.poll() is None else process.returncode
            assert code == 0
        finally:
            process.kill()


@contextmanager
def server_on_a_socket(*options: str) -> Iterator[RunningServer]:
    """A `python -m server` on a Unix socket."""
    with private_folder() as folder, serving(server_command(folder / "server", *options)) as server:
        yield server


def server_command(socket: Path, *options: str) -> list[str]:
    """The command line of a server on a Unix socket."""
    command = [sys.executable, "-m", "server", "--bind", f"ipc://{socket}", "--log-level", "error"]
    return [*command, "--silence-seconds", str(SILENCE_SECONDS), *options]


def as_rank(endpoint: str, job: str, rank: int, program: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `program(connection, *arguments)` as one of the two ranks of a job."""
    with client.connect(
        endpoint, job=job, rank=rank, world_size=2, round_timeout=WAIT_SECONDS, join_timeout=WAIT_SECONDS
    ) as connection:
        return program(connection, *arguments)


@dataclass(frozen=True)
class Received:
    """The parts of an aggregate that must be equal on all ranks; `values` in bytes."""

    key: tuple[Any, ...]
    count: int
    replicas: int
    members: tuple[int, ...]
    values: bytes

    @classmethod
    def of(cls, aggregate: Aggregate) -> "Received":
        """Returns these parts of an aggregate."""
        members, values = tuple(aggregate.members), aggregate.values.tobytes()
        return cls(tuple(aggregate.key), aggregate.count, aggregate.replicas, members, values)


def exchange_by_hand(connection: client.Connection) -> list[Received]:
    """One forward and one backward round through a `SlavePipe`."""
    pipe = client.SlavePipe(connection, "layer")
    counts = COUNTS[connection.rank]
    there = pipe.run_slave(Rows(counts, FORWARD[connection.rank]))
    back = pipe.run_slave(Rows(counts, BACKWARD[connection.rank]), there.key.of_phase("backward"))
    return [Received.of(there), Received.of(back)]


REPLICAS = ["cpu"] * 3


def to_all(value, messages):
    return [(who, value) for who, _ in messages]


class Total(nn.Module):
    """A user's module for Synchronized-BatchNorm-PyTorch: the master adds the values of all replicas."""

    def __init__(self):
        super().__init__()
        self.master = client.comm.SyncMaster(self.answer)
        self.pipe = None

    def answer(self, messages):
        return to_all(sum(message for _, message in messages), messages)

    def __data_parallel_replicate__(self, ctx, copy_id):
        if copy_id == 0:
            ctx.master = self.master
        else:
            self.pipe = ctx.master.register_slave(copy_id)

    def total(self, x):
        return self.master.run_master(x.sum()) if self.pipe is None else self.pipe.run_slave(x.sum())

    def forward(self, x):
        return x * 0 + self.total(x)
