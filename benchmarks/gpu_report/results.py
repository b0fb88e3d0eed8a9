"""Results of all steps so far, in `results.json`, and the files of the steps in the same folder."""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

# Limits of the report's folder, which users send; results.json and report.md count too.
MAX_FILES = 8
MAX_BYTES = 16 << 20
OWN_FILES = ("results.json", "report.md")

FORMAT = 1

PASSED = "passed"


@dataclass
class Result:
    """Result of one step.

    Attributes:
        outcome: `PASSED`, or in words how it failed.
        started: date and time, UTC.
        seconds: how long it ran.
        limit: the time limit in seconds.
        commit: of this repository.
        stand_in: the CPU stood in for the GPU.
        plant: the fault that a test planted; empty in a real report.
        may_fail: a failure does not change the exit status.
        device: the device's name; empty if the step did not get that far.
        checks: each with `name`, `passed` and `detail`.
        figures: each with `name`, `value`, `unit` and `of`.
        notes: remarks.
        files: names of its files in the report's folder.
        log: the end of its standard output and error, if it did not pass.
    """

    outcome: str
    started: str
    seconds: float
    limit: float
    commit: str
    stand_in: bool
    plant: str = ""
    may_fail: bool = False
    device: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    log: str = ""

    @property
    def failed_checks(self) -> list[dict[str, Any]]:
        """Checks that did not pass."""
        return [check for check in self.checks if not check["passed"]]


@dataclass
class Results:
    """All results of a report's folder, by the step's name."""

    folder: Path
    steps: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Returns the results of earlier calls.

        Raises:
            ValueError: this program did not write `results.json`.
        """
        path = folder / "results.json"
        if not path.exists():
            return cls(folder)
        try:
            found = json.loads(path.read_text())
            steps = {name: Result(**each) for name, each in found.pop("steps").items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected the results of scripts/gpu-report in format {FORMAT}: {error}"
            ) from error
        if found != {"format": FORMAT}:
            raise ValueError(f"{path}: expected format {FORMAT}, got {found}")
        return cls(folder, steps)

    def save(self) -> None:
        """Replaces `results.json` atomically."""
        steps = {name: asdict(result) for name, result in self.steps.items()}
        replace(self.folder / "results.json", json.dumps({"format": FORMAT, "steps": steps}, indent=1) + "\n")

    def add(self, name: str, result: Result, written: Path) -> None:
        """Replaces the result and the files of a step.

        Args:
            name: of the step.
            result: without its files.
            written: the folder with the step's files; those within the limits are moved.
        """
        if earlier := self.steps.get(name):
            for file in earlier.files:
                (self.folder / file).unlink(missing_ok=True)
        self.steps[name] = result
        for path in sorted(each for each in written.rglob("*") if each.is_file() and not each.is_symlink()):
            refused = self._refuses(path)
            target = self.folder / re.sub(r"[^A-Za-z0-9._-]", "_", f"{name}-{path.name}")
            if refused or target.name in result.files:
                result.notes.append(f"dropped {path.name}: {refused or 'a file of this name exists'}")
                continue
            target.write_bytes(path.read_bytes())
            result.files.append(target.name)

    def _refuses(self, path: Path) -> str:
        nr_files = len(OWN_FILES) + sum(len(result.files) for result in self.steps.values())
        if nr_files >= MAX_FILES:
            return f"expected at most {MAX_FILES} files, and there are as many"
        size = path.stat().st_size
        return f"expected at most {MAX_BYTES} bytes, got {size}" if size > MAX_BYTES else ""


def replace(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)  # noqa: PTH105 - Path.replace is the same
