"""Start the process of each step, end it at its time limit, and collect its records.

The unused time of a step extends the limits of later steps; each step has at least its share of the time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_report.results import PASSED, Result
from gpu_report.step import MAX_CHARACTERS
from gpu_report.steps import PLANS, TOTAL_SECONDS, Plan

ROOT = Path(__file__).resolve().parents[2]

# Seconds for work outside of the steps' shares, such as the first import of torch.
SPARE_SECONDS = TOTAL_SECONDS - sum(plan.seconds for plan in PLANS)

# Longest wait for the end of a killed process.
KILL_SECONDS = 10.0

# Fields that each kind of record must have, and their types.
RECORDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "device": {"text": str},
    "check": {"name": str, "passed": bool, "detail": str},
    "figure": {"name": str, "value": (int, float, str), "unit": str, "of": dict},
    "note": {"text": str},
    "raised": {"text": str},
    "ended": {},
}


@dataclass(frozen=True)
class Runner:
    """Runs steps, each in a process.

    Attributes:
        seconds: for all steps together; if only some run, they get their shares.
        stand_in: the CPU stands in for the GPU.
        plant: `MODULE:NAME` of a context manager that is entered in each process; for tests.
        begun: when `seconds` began to run, by the monotonic clock.
    """

    seconds: float = TOTAL_SECONDS
    stand_in: bool = False
    plant: str = ""
    begun: float = field(default_factory=time.monotonic)

    def run(self, plans: Sequence[Plan], done: Callable[[Plan, Result, Path], None]) -> None:
        """Runs steps one after another.

        Args:
            plans: the steps.
            done: called after each, with its result and the folder of its files, which is removed afterwards.
        """
        scale = self.seconds / TOTAL_SECONDS
        deadline = self.begun + scale * (SPARE_SECONDS + sum(plan.seconds for plan in plans))
        commit = current_commit()
        for number, plan in enumerate(plans):
            later = scale * sum(each.seconds for each in plans[number + 1 :])
            limit = max(deadline - later - time.monotonic(), scale * plan.seconds)
            with tempfile.TemporaryDirectory(prefix="gpu-report-", ignore_cleanup_errors=True) as folder:
                written = Path(folder) / "output"
                done(plan, self._run(plan, limit, Path(folder), written, commit), written)

    def _run(self, plan: Plan, limit: float, folder: Path, written: Path, commit: str) -> Result:
        written.mkdir()
        records, log = folder / "records", folder / "log"
        records.touch()
        command = [sys.executable, "-m", "gpu_report.child", plan.full_module, str(records), str(written)]
        command += ["--stand-in"] * self.stand_in + [f"--plant={self.plant}"] * bool(self.plant)
        started, begin = datetime.now(UTC), time.monotonic()
        # Small shapes are slower with more threads.
        environ = {**os.environ, "OMP_NUM_THREADS": "1"} if self.stand_in else None
        with log.open("wb") as stream:
            status = ended_within(limit, command, stream, environ)
        recorded = Recorded.read(records)
        result = Result(
            outcome=recorded.outcome(status, limit),
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - begin, 1),
            limit=round(limit, 1),
            commit=commit,
            stand_in=self.stand_in,
            plant=self.plant,
            may_fail=plan.may_fail,
            device=recorded.device,
            checks=recorded.checks,
            figures=recorded.figures,
            notes=recorded.notes,
        )
        if result.outcome != PASSED:
            result.log = end_of(log)
        return result


def ended_within(limit: float, command: list[str], log: Any, environ: dict[str, str] | None = None) -> int | None:
    """Runs a command in a new process group, and kills all of the group afterwards.

    Args:
        limit: in seconds.
        command: the program and its arguments.
        log: file of its standard output and error.
        environ: its environment; None: the environment of this process.

    Returns:
        The exit status, negative after a signal; None if it was killed at the limit.
    """
    process = subprocess.Popen(  # noqa: S603 - of this project
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
    )
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a hung driver may keep the process for ever
            process.wait(timeout=KILL_SECONDS)


def end_of(log: Path) -> str:
    """Returns the last `MAX_CHARACTERS` bytes of a file as text."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MAX_CHARACTERS))
        return file.read().decode(errors="replace")


@dataclass
class Recorded:
    """Records of a step; invalid lines are only counted."""

    device: str = ""
    raised: str = ""
    has_ended: bool = False
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreadable: int = 0

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """Reads a file of records; the last line may be cut off."""
        found = cls()
        for line in path.read_text(errors="replace").splitlines():
            found._add(line)
        return found

    def _add(self, line: str) -> None:
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            fields = RECORDS[kind]
            is_sound = record.keys() == fields.keys() and all(isinstance(record[key], fields[key]) for key in fields)
        except (ValueError, KeyError, TypeError, AttributeError):
            is_sound = False
        if is_sound:
            self._take(kind, record)
        else:
            self.unreadable += 1

    def _take(self, kind: str, record: dict[str, Any]) -> None:
        match kind:
            case "check":
                self.checks.append(record)
            case "figure":
                self.figures.append(record)
            case "note":
                self.notes.append(record["text"])
            case "ended":
                self.has_ended = True
            case _:
                setattr(self, kind, record["text"])

    def outcome(self, status: int | None, limit: float) -> str:
        """Returns `PASSED`, or the first fault.

        Args:
            status: as `ended_within` returns it.
            limit: seconds.
        """
        if fault := self._fault(status, limit):
            return fault
        if failed := sum(not check["passed"] for check in self.checks):
            return f"{failed} of {len(self.checks)} checks failed"
        return PASSED if self.checks else "checked nothing"

    def _fault(self, status: int | None, limit: float) -> str:
        """Returns why the step's process failed; empty if it did not."""
        if status is None:
            return f"ended at its limit of {limit:.0f} s"
        if status < 0:
            return f"crashed: {signal.strsignal(-status)}"
        if self.raised:
            return f"raised {self.raised.strip().splitlines()[-1]}"
        if status or not self.has_ended:
            return f"ended before its time, with exit status {status}"
        return f"{self.unreadable} of its records could not be read" if self.unreadable else ""


def current_commit() -> str:
    """Returns the commit that is checked out, with "-dirty" if files differ; "unknown" without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603 - git itself
    except (OSError, subprocess.SubprocessError):
        return "unknown"
