"""Kept: what a benchmark has found, with where and when, as a file beside its page."""

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
class Kept:
    """What one benchmark found.

    Attributes:
        date: of the run, as 2026-11-23.
        commit: of the code.
        busy: processors that others used just before, or meanwhile, whichever was more.
        machine: processors and versions, in words.
        command: what was run, with its arguments.
        found: what it printed with `--json`.
    """

    date: str
    commit: str
    busy: float
    machine: str
    command: str
    found: Any

    @classmethod
    def now(cls, busy: float, command: str, found: Any) -> Self:
        """Returns what was found just now, here."""
        today = datetime.now(UTC).date().isoformat()
        return cls(today, _commit(), round(busy, 2), _machine(), command, found)

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Returns what is kept of a benchmark; None of one that has not been run."""
        path = _path(name)
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def keep(self, name: str) -> None:
        """Writes the file."""
        _path(name).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @property
    def caption(self) -> str:
        """Where the figures are from, a sentence or two."""
        others = f"{self.busy:g} processors in use by others"
        state = others if self.busy <= QUIET else f"**on a busy machine**, with {others}"
        return f"`{self.command}`, {self.date}, commit {self.commit}, {state}. {self.machine}."


def _path(name: str) -> Path:
    return ROOT / "benchmarks" / name / "results.json"


def _commit() -> str:
    """Returns the commit, and whether code has changed since; pages change with each benchmark."""
    name = _git("rev-parse", "--short=7", "HEAD")
    return f"{name}-dirty" if _git("status", "--porcelain", "--", "*.py") else name


def _git(*arguments: str) -> str:
    command = ["git", *arguments]  # whichever git there is
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def _machine() -> str:
    torch, pyzmq, numpy = (version(name).split("+")[0] for name in ("torch", "pyzmq", "numpy"))
    return (
        f"{os.cpu_count()} {platform.machine()} processors, Python {platform.python_version()}, torch {torch}, "
        f"numpy {numpy}, pyzmq {pyzmq}"
    )
