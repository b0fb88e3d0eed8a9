"""Result of a benchmark, with date, commit and machine, in a file next to the benchmark's page."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from bench.quiet import QUIET

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one benchmark.

    Attributes:
        date: of the run, as 2026-11-23.
        commit: of the code.
        busy: processors in use by other programs, the maximum of just before and during the run.
        machine: processors and versions, in words.
        command: the command line.
        found: the output of that command with `--json`.
    """

    date: str
    commit: str
    busy: float
    machine: str
    command: str
    found: Any

    @classmethod
    def now(cls, busy: float, command: str, found: Any) -> Self:
        """Returns a result with the present date, commit and machine."""
        today = datetime.now(UTC).date().isoformat()
        return cls(today, _commit(), round(busy, 2), _machine(), command, found)

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Returns the saved result of a benchmark; None if it has not been run."""
        path = _path(name)
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def save(self, name: str) -> None:
        """Writes the file."""
        _path(name).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @property
    def caption(self) -> str:
        """Command, date, commit and machine of the figures, in words."""
        others = f"{self.busy:g} processors in use by others"
        state = others if self.busy <= QUIET else f"**on a busy machine**, with {others}"
        return f"`{self.command}`, {self.date}, commit {self.commit}, {state}. {self.machine}."


def _path(name: str) -> Path:
    return ROOT / "benchmarks" / name / "results.json"


def _commit() -> str:
    """Returns the commit, with "-dirty" if a Python file differs. Pages do not count: each benchmark changes one."""
    name = _git("rev-parse", "--short=7", "HEAD")
    return f"{name}-dirty" if _git("status", "--porcelain", "--", "*.py") else name


def _git(*arguments: str) -> str:
    command = ["git", *arguments]  # the git on the PATH
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def _machine() -> str:
    torch, pyzmq, numpy = (version(name).split("+")[0] for name in ("torch", "pyzmq", "numpy"))
    return (
        f"{os.cpu_count()} {platform.machine()} processors, Python {platform.python_version()}, torch {torch}, "
        f"numpy {numpy}, pyzmq {pyzmq}"
    )
