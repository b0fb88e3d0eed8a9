"""Repeats the scenarios of the chaos tests, and prints a table of the measurements; `scripts/chaos` runs it."""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Small tensors in many processes: more threads than cores slow each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from chaos import chaos_scenarios, chaos_world
from chaos.chaos_scenarios import Result
from chaos.chaos_world import Finding
from client.session.protocol.member import TRANSPORTS
from support import starter

HEADER = (
    f"{'scenario':32} {'runs':>5} {'troubles':>8} {'median s':>9} {'worst s':>9} {'bit-identical':>14} {'findings':>9}"
)


@dataclass
class Line:
    name: str
    runs: int = 0
    results: list[Result] = field(default_factory=list)
    findings: int = 0

    def __str__(self) -> str:
        seconds = [second for result in self.results for second in result.seconds]
        median, worst = (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")
        compared = [result.identical for result in self.results if result.identical is not None]
        identical = f"{sum(compared)} of {self.runs}" if compared else "-"
        return (
            f"{self.name:32} {self.runs:>5} {len(seconds):>8} {median:>9} {worst:>9} {identical:>14} {self.findings:>9}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    scenarios = [each for each in chaos_scenarios.SCENARIOS if options.only in {None, each.__name__}]
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"again with: scripts/chaos --seed {seed}")
    lines = [Line(each.__name__) for each in scenarios]
    if options.transport:
        os.environ["STATSD_BN_TRANSPORT"] = options.transport
    starter.warm_up()
    for turn in _rounds(options):
        for line, scenario in zip(lines, scenarios, strict=True):
            _run(line, scenario, f"{seed} {turn} {line.name}")
    print(HEADER)
    for line in lines:
        print(line)
    return int(any(line.findings for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Kills, stops, jams and cuts off members and the server while real layers train, and prints the "
        "results. Seconds are from each fault until all survivors reported it, or until all had trained one more "
        "step; for a member in a loop, from the deadline.",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--rounds", type=_positive(int), default=3, help="runs of all scenarios (default 3)")
    length.add_argument("--minutes", type=_positive(float), help="start no further run after this time")
    parser.add_argument("--seed", type=int, help="seed of the faults (default: a new one each time, printed)")
    parser.add_argument("--transport", choices=TRANSPORTS, help="transport of the members' rows")
    parser.add_argument("--only", choices=[each.__name__ for each in chaos_scenarios.SCENARIOS], help="one scenario")
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
        return value

    return read


def _rounds(options: argparse.Namespace) -> Iterator[int]:
    if options.minutes is None:
        yield from range(options.rounds)
        return
    end = time.monotonic() + options.minutes * 60
    turn = 0
    while time.monotonic() < end:
        yield turn
        turn += 1


def _run(line: Line, scenario: Callable[[random.Random, Path], Result], seed: str) -> None:
    """Runs one scenario; a finding ends only this run."""
    before = chaos_world.descendants()
    line.runs += 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = scenario(random.Random(seed), Path(folder))
        left = chaos_world.descendants() - before
        chaos_world.require(not left, f"processes were left behind: {sorted(left)}")
        line.results.append(result)
    except Finding as finding:
        line.findings += 1
        print(f"{line.name}, seed {seed!r}: {finding}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
