"""The harness: trains the digits in containers, undisturbed, disturbed and attacked; prints a table of the results.

Exits with 0 if all results are as expected, with 1 if one is not, and with 2 without a container engine.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from attacks import ATTACKS
from engine import BUILD_SECONDS, FOLDER, EngineError, Stack, build_settings, compose_command, docker
from scenarios import SCENARIOS, Outcome, Plan

FILES = [FOLDER / "docker-compose.yml"]
GPU_FILES = [*FILES, FOLDER / "docker-compose.gpu.yml"]

# Numbers of replicas that divide the batch of 8 and leave others after a loss.
POSSIBLE_REPLICAS = (4, 8)

HEADINGS = ("scenario", "expected", "got", "seconds", "ok")


@dataclass(frozen=True, slots=True)
class Row:
    """A scenario's row in the table."""

    scenario: str
    outcome: Outcome
    seconds: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells below HEADINGS."""
        verdict = "yes" if self.outcome.ok else "NO"
        return self.scenario, self.outcome.expected, self.outcome.got, f"{self.seconds:.1f}", verdict


def main() -> int:
    """Runs the harness and returns its exit code."""
    options = arguments()
    # SIGTERM must raise an exception too, as Ctrl-C does: its default action would leave the containers running.
    signal.signal(signal.SIGTERM, leave)
    try:
        compose = compose_command()
        version = docker("version", "--format", "{{.Server.Version}}").strip()
        settings = {**build_settings(), "REPLICAS": str(options.replicas), "DEADLINE": str(options.deadline)}
    except EngineError as error:
        print(f"harness: {error}", file=sys.stderr)
        return 2
    logs = options.logs or Path(tempfile.mkdtemp(prefix="statsd-bn-harness-"))
    files = GPU_FILES if options.gpu else FILES
    print(f"Engine {version}, {' '.join(compose)}; logs in {logs}", flush=True)

    def stack(scenario: str) -> Stack:
        return Stack(compose, files, f"statsd-bn-{os.getpid()}-{scenario}", settings, logs / scenario)

    plan = Plan(options.replicas, options.deadline, stack)
    try:
        if not options.no_build:
            build(stack("build"))
        rows = [attempt(scenario, plan) for scenario in (*SCENARIOS, *ATTACKS)]
    except KeyboardInterrupt:
        print("Interrupted; no container is left.", file=sys.stderr)
        return 128 + signal.SIGINT
    except EngineError as error:
        print(f"harness: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0 if all(row.outcome.ok for row in rows) else 1


def build(stack: Stack) -> None:
    """Builds the images."""
    started = time.monotonic()
    stack.compose("build", seconds=BUILD_SECONDS)
    print(f"Built in {time.monotonic() - started:.0f} s", flush=True)


def attempt(scenario: Callable[[Plan], Outcome], plan: Plan) -> Row:
    """Runs a scenario; if it ends with an EngineError, that is the result."""
    name = scenario.__name__.replace("_", " ")
    started = time.monotonic()
    try:
        outcome = scenario(plan)
    except EngineError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        outcome = Outcome("an end", str(error).splitlines()[0], ok=False)
    print(f"{name}: {outcome.got}", flush=True)
    return Row(name, outcome, time.monotonic() - started)


def table(rows: list[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(HEADINGS, *(row.cells for row in rows), strict=True)]
    lines = [HEADINGS, tuple("-" * width for width in widths), *(row.cells for row in rows)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def leave(number: int, _frame: object) -> NoReturn:
    """Ends the harness by an exception, so that its containers, networks and volumes are removed."""
    raise SystemExit(128 + number)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="docker/harness",
        description=__doc__,
        epilog="COMPOSE is the command of Compose; BASE_IMAGE, WHEELS, BUILD_NETWORK, STEPS, COMPARE_AFTER and "
        "TRAINING are the variables of docker-compose.yml.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--replicas",
        type=int,
        choices=POSSIBLE_REPLICAS,
        default=os.environ.get("REPLICAS", "4"),
        help="number of replicas (REPLICAS; default: 4)",
    )
    parser.add_argument(
        "--deadline", type=float, default=20.0, metavar="SECONDS", help="timeout of a round (default: 20)"
    )
    parser.add_argument("--gpu", action="store_true", help="add docker-compose.gpu.yml")
    parser.add_argument("--no-build", action="store_true", help="use the existing images")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for the containers' logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
