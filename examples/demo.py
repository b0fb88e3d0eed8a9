"""The demo: the same training in four ways, and a table of the results.

Exits with 0 if synchronised training equals training on the whole batch up to rounding, with 1 if not or if a process
failed.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import report
import ways
from children import ChildFailed

STEPS = 600

# Rounding differences grow with every step; a real difference shows within a hundred steps.
COMPARE_AFTER = 100

INTRODUCTION = (
    "Batch norm needs the statistics of the whole batch, but a process that loads 2 of the 8 images sees only those 2. "
    "One small network learns 1,437 handwritten digits four times, from the same weights and in the same order: with "
    "the whole batch in one process, in four processes that share their statistics over a `python -m server`, in four "
    "that do not, and in four replicas within one process."
)

TRAININGS: dict[str, Callable[[ways.Length, ways.OnStep], ways.Trained]] = {
    report.WHOLE_BATCH: ways.whole_batch,
    report.SYNCHRONISED: ways.synchronised,
    report.UNSYNCHRONISED: ways.unsynchronised,
    report.DATA_PARALLEL: ways.data_parallel,
}


def main() -> int:
    """Runs the demo and returns its exit code."""
    options = arguments()
    length = ways.Length(options.steps, min(options.steps, COMPARE_AFTER))
    console = Console(stderr=options.json, highlight=False)
    started = time.monotonic()
    console.print(escape(INTRODUCTION), end="\n\n")
    # By default SIGTERM would leave the children running.
    signal.signal(signal.SIGTERM, leave)
    try:
        rows = report.results({way: train(way, length, console) for way in TRAININGS})
    except ChildFailed as error:
        console.print(escape(f"\nThe demo failed: {error}"), style="red", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted; all processes are stopped.")
        return 128 + signal.SIGINT
    console.print()
    report.show(console, rows, length)
    good, sentence = report.verdict(rows, length)
    console.print(f"\n{sentence}", style="green" if good else "red")
    console.print(f"\n{report.cost(rows)} The demo took {time.monotonic() - started:.0f} s.")
    if options.json:
        print(json.dumps(report.as_json(rows, length), indent=2))
    return 0 if good else 1


def train(way: str, length: ways.Length, console: Console) -> ways.Trained:
    """Trains in one way, and shows the progress."""
    started = time.monotonic()
    with progress(report.TITLES[way], length.steps, console) as on_step:
        trained = TRAININGS[way](length, on_step)
        on_step(length.steps)
    return replace(trained, seconds=time.monotonic() - started)


@contextmanager
def progress(title: str, steps: int, console: Console) -> Iterator[ways.OnStep]:
    """Yields a function that moves a progress bar; without a terminal, prints a line at the end."""
    if not console.is_interactive:
        started = time.monotonic()
        yield lambda _: None
        console.print(f"{title}: {steps} steps in {time.monotonic() - started:.0f} s")
        return
    width = max(map(len, report.TITLES.values()))
    columns = TextColumn(f"{{task.description:{width}}}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        # Without a total the bar pulses: processes take seconds to start.
        task = bar.add_task(title, total=None)
        yield lambda step: bar.update(task, completed=step, total=steps)


def leave(number: int, _frame: object) -> NoReturn:
    """Ends the demo by an exception, which stops its processes."""
    raise SystemExit(128 + number)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--steps", type=positive, default=STEPS, help=f"batches of 8 images to train with (default: {STEPS})"
    )
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout; all else on stderr")
    return parser.parse_args()


def positive(text: str) -> int:
    """Returns a number of steps.

    Raises:
        ValueError: the text is not a number of 1 or more.
    """
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
