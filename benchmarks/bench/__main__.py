"""Runs benchmarks; see the package."""

import argparse
import json
import shlex
import subprocess
import sys

from bench import plots
from bench.pages import page_of, written
from bench.quiet import QUIET, Others, wait_until_quiet
from bench.results import ROOT, Result
from bench.tables import TABLES


def main() -> None:
    """Runs the benchmarks, saves their results and writes the pages."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Runs benchmarks and writes their tables.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(TABLES)}; default: all")
    parser.add_argument("--pages", action="store_true", help="run nothing, write the pages from the saved results")
    parser.add_argument("--wait", type=float, default=120.0, help="most seconds to wait for a quiet machine")
    parser.add_argument("--busy", action="store_true", help="run on a busy machine too; the figures are marked")
    options = parser.parse_args()
    if unknown := set(options.names) - set(TABLES):
        parser.error(f"expected names of {', '.join(TABLES)}, got {', '.join(sorted(unknown))}")
    for name in options.names or TABLES:
        if not options.pages:
            _run(name, options.wait, may_be_busy=options.busy)
        if result := Result.of(name):
            page = page_of(name)
            page.write_text(written(name, page.read_text(), result))
    plots.write()


def _run(name: str, wait: float, *, may_be_busy: bool) -> None:
    busy = wait_until_quiet(wait)
    if busy > QUIET and not may_be_busy:
        sys.exit(
            f"{name}: expected at most {QUIET:g} processors in use by others, got {busy:.1f}; --busy runs it anyway"
        )
    command = shlex.split(f"python benchmarks/{name}/main.py {TABLES[name].arguments}")
    print(f"{shlex.join(command)}, with {busy:.1f} processors in use by others", flush=True)
    with Others() as others:
        done = subprocess.run(  # noqa: S603 - of this project
            [sys.executable, *command[1:], "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
    Result.now(max(busy, others.processors), shlex.join(command), json.loads(done.stdout)).save(name)


if __name__ == "__main__":
    main()
