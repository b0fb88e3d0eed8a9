"""Stragglers: how soon a slow rank is named, and how often one that is not slow.

Rounds of eight ranks are drawn by chance: what each computes before each round, and from that how long each waits. They
go minute by minute to `server.insight.pace`, as a server's would. No process, no socket; a second of a rank costs
nothing.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from server.insight.pace import MOST_HELD, STARTUP_SECONDS, WINDOW_SECONDS, Pace

Times = npt.NDArray[np.float64]

# Seconds that a rank computes between two rounds, in the mean; and what a round takes beside.
STEP, ROUND = 0.1, 0.001
MINUTES = 10


def _alike(chance: np.random.Generator, shape: tuple[int, int]) -> Times:
    return STEP * chance.lognormal(0.0, 0.1, shape)


def _heavy_tails(chance: np.random.Generator, shape: tuple[int, int]) -> Times:
    """Now and then somebody waits for a disk: one call in 200 takes ten times as long."""
    return _alike(chance, shape) * np.where(chance.random(shape) < 0.005, 10.0, 1.0)


def _slower(factor: float) -> Callable[[np.random.Generator, tuple[int, int]], Times]:
    def draw(chance: np.random.Generator, shape: tuple[int, int]) -> Times:
        times = _heavy_tails(chance, shape)
        times[:, -1] *= factor
        return times

    return draw


def _stalls(chance: np.random.Generator, shape: tuple[int, int]) -> Times:
    """The last rank stands still for 4 s some two times a minute."""
    times = _heavy_tails(chance, shape)
    times[:, -1] += np.where(chance.random(shape[0]) < STEP / 30, 4.0, 0.0)
    return times


CASES = {
    "all alike": _alike,
    "all alike, heavy tails": _heavy_tails,
    "one 1.1 times as slow": _slower(1.1),
    "one 1.2 times as slow": _slower(1.2),
    "one 1.5 times as slow": _slower(1.5),
    "one 2 times as slow": _slower(2.0),
    "one stalls for 4 s twice a minute": _stalls,
}


def main() -> None:
    """Draws all cases and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=200, help="of each case, ten minutes long")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(case, options.ranks, options.runs) for case in CASES]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"one is named if the others wait for it {MOST_HELD:.0%} of a minute")
    print(f"{'case':>35} {'named':>6} {'another':>8} {'median s':>9} {'held':>6}")
    for row in rows:
        after = "-" if row["after"] is None else f"{row['after']:.0f}"
        print(f"{row['case']:>35} {row['named']:>6.0%} {row['others']:>8.1%} {after:>9} {row['held']:>6.1%}")


def measure(case: str, ranks: int, runs: int) -> dict[str, Any]:
    """Returns in how many runs the last rank was named, and another, and after how many seconds.

    `held` is the median part of a minute that the others waited for the slowest.
    """
    found = [_run(CASES[case](np.random.default_rng(run), (int(MINUTES * 60 / STEP), ranks))) for run in range(runs)]
    after = [seconds[0] for seconds, _, _ in found if seconds]
    return {
        "case": case,
        "named": len(after) / runs,
        "others": sum(bool(others) for _, others, _ in found) / runs,
        "after": statistics.median(after) if after else None,
        "held": statistics.median(held for _, _, all_held in found for held in all_held),
    }


def _run(computing: Times) -> tuple[list[float], list[float], list[float]]:
    """Returns when the last rank was named, when another was, and what was held in each minute."""
    longest = computing.max(axis=1, keepdims=True)
    ends = np.cumsum(longest + ROUND)
    waited = np.cumsum(longest - computing + ROUND, axis=0)
    pace, last = Pace(), computing.shape[1] - 1
    pace.begin(0.0, 1)
    named: tuple[list[float], list[float]] = ([], [])
    held = []
    for end in np.arange(STARTUP_SECONDS, ends[-1], WINDOW_SECONDS):
        rounds = int(np.searchsorted(ends, end))
        if pace.end_window(float(end), rounds, dict(enumerate(waited[rounds - 1].tolist()))):
            named[pace.minute.slowest != last].append(float(end))
        held.append(pace.minute.held)
    return *named, held[1:]


if __name__ == "__main__":
    main()
