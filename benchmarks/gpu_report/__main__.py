"""Runs steps of the report; see the package."""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gpu_report import words
from gpu_report.results import PASSED, Result, Results, replace
from gpu_report.runner import ROOT, Runner
from gpu_report.steps import PLANS, TOTAL_SECONDS, Plan

# Exit status of the process that asks torch for a CUDA device, if there is none.
NO_DEVICE = 75
ASKS_FOR_DEVICE = f"import sys, torch; sys.exit(0 if torch.cuda.is_available() else {NO_DEVICE})"


def main() -> None:
    """Runs steps and saves the report; exits with 0 if all passed, 1 if something failed, 2 if an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-report",
        description="Runs the steps of the GPU report, and writes results.json and report.md after each.",
    )
    known = {plan.name: plan for plan in PLANS}
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"any of {', '.join(known)}; default: all")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=TOTAL_SECONDS,
        help="for all steps together; a selection gets its share (default %(default)g)",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "gpu-report", metavar="DIR", help="report folder (default: gpu-report)"
    )
    parser.add_argument("--stand-in", action="store_true", help="run on the CPU, with small shapes; to try the steps")
    parser.add_argument(
        "--plant", default="", metavar="MODULE:NAME", help="context manager to enter; to test the steps"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.steps if name not in known]:
        parser.error(f"expected steps of {', '.join(known)}, got {', '.join(unknown)}")
    try:
        results = Results.load(options.output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    runner = Runner(options.seconds, options.stand_in, options.plant)
    if not options.stand_in and not has_device():
        parser.error("expected a CUDA device that torch can use, and found none; --stand-in runs on the CPU")
    plans = [plan for plan in PLANS if plan.name in options.steps or not options.steps]
    sys.exit(report(runner, plans, results))


def report(runner: Runner, plans: Sequence[Plan], results: Results, all_plans: Sequence[Plan] = PLANS) -> int:
    """Runs steps and writes the report after each; returns the exit status.

    Args:
        runner: runs the steps.
        plans: the steps to run.
        results: the results of earlier calls; new ones are added to them.
        all_plans: all steps; the report lists the missing ones.
    """
    signal.signal(signal.SIGTERM, _interrupted)
    results.folder.mkdir(parents=True, exist_ok=True)

    def done(plan: Plan, result: Result, written: Path) -> None:
        results.add(plan.name, result, written)
        results.save()
        replace(results.folder / "report.md", words.written(results, all_plans))
        print(f"{plan.name}: {result.outcome} ({result.seconds:g} s)", flush=True)

    runner.run(plans, done)
    print(f"See {results.folder / 'report.md'}")
    ended = [results.steps[plan.name] for plan in plans]
    return int(any(result.outcome != PASSED and not result.may_fail for result in ended))


def has_device() -> bool:
    """Whether torch finds a CUDA device; asked in another process, which may crash or hang like any step."""
    try:
        return subprocess.run([sys.executable, "-c", ASKS_FOR_DEVICE], check=False, timeout=60).returncode != NO_DEVICE  # noqa: S603 - our own line
    except subprocess.TimeoutExpired:
        return True


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return seconds


def _interrupted(*_: object) -> NoReturn:
    """Raises in the main thread, whose `finally` blocks end the step's process."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
