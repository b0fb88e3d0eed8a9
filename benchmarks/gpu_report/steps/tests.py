"""Whether the tests of `tests/gpu` that need a GPU, marked `cuda`, pass on it.

Where the CPU stands in for the GPU, the tests without this mark run, which check the same.
"""

from collections import Counter
from pathlib import Path

import pytest

from gpu_report.runner import ROOT
from gpu_report.step import Step

FOLDER = ROOT / "tests" / "gpu"

# Seconds after which a test fails, so that a hanging test leaves time for the other tests.
TIMEOUT = 25


def run(step: Step) -> None:
    """Runs pytest in this process, so that results are recorded even if the step is killed later."""
    recorder = Recorder(step)
    options = [f"--config-file={FOLDER / 'pytest.ini'}", f"--timeout={TIMEOUT}", "--continue-on-collection-errors"]
    which = ["-p", "no:cacheprovider", "-m", step.pick("cuda", "not cuda"), str(FOLDER)]
    status = pytest.main([*options, *which], plugins=[recorder])
    recorder.end()
    step.check(
        "pytest ends well", status in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}, pytest.ExitCode(status).name
    )
    for outcome in ("passed", "failed", "skipped"):
        step.figure(outcome, sum(of_file[outcome] for of_file in recorder.of_files.values()), "tests")
    for reason, number in recorder.reasons.most_common():
        step.note(f"{number} skipped: {reason}")


class Recorder:
    """Plug-in of pytest: a failed check for each test that fails, and a check for each file of tests."""

    def __init__(self, step: Step) -> None:
        self.of_files: dict[str, Counter[str]] = {}
        self.reasons: Counter[str] = Counter()
        self._step = step
        self._file = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records a file that cannot be imported as a failed check."""
        if report.failed:
            self._failed(report.nodeid, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts the outcome of a test, of its set-up or of its tear-down."""
        file = report.nodeid.split("::")[0]
        if file != self._file:
            self.end()
            self._file = file
        if report.failed:
            self._failed(report.nodeid, report.longreprtext)
        elif report.skipped:
            self._count(report.nodeid, "skipped")
            skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            reason = getattr(report, "wasxfail", skipped)  # after an expected failure `skipped` is a traceback
            self.reasons[reason.removeprefix("Skipped: ").removeprefix("reason: ")] += 1
        elif report.when == "call":
            self._count(report.nodeid, "passed")

    def end(self) -> None:
        """Records a check for a file whose tests have run; it fails if one failed or all were skipped."""
        if self._file:
            found = self.of_files.get(self._file, Counter())
            summary = ", ".join(f"{number} {outcome}" for outcome, number in found.items())
            self._step.check(
                f"all tests of {Path(self._file).name} pass", found["passed"] and not found["failed"], summary
            )

    def _failed(self, name: str, text: str) -> None:
        self._count(name, "failed")
        self._step.check(name.rsplit("/", maxsplit=1)[-1], passed=False, detail=text[-2000:])

    def _count(self, name: str, outcome: str) -> None:
        self.of_files.setdefault(name.split("::", maxsplit=1)[0], Counter())[outcome] += 1
