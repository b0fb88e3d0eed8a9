"""Runs many worlds of the fault simulator; tests/simulation/README.md explains its words."""

import argparse
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator

import support.without_torch  # noqa: F401 - a world needs no torch, and starts at once without it
from simulation import simulator
from simulation.planted_bugs import BUGS
from simulation.simulator import Counters, Finding, World

# Seeds that a process gets at a time: enough to make messages between processes cheap, few enough to share evenly.
CHUNK = 25

# Findings printed with their text; further ones are listed by seed.
SHOWN = 3

Chunk = tuple[int, int, str]


def run_chunk(chunk: Chunk) -> tuple[Counters, list[tuple[int, str]]]:
    """Run consecutive seeds, with a planted bug up to its first finding; returns counters and findings by seed."""
    first, end, bug = chunk
    counters, found = Counters(), []
    # The objects of a world refer to each other and live until its end, so garbage collection would free none of them.
    gc.disable()
    with simulator.quiet(), BUGS[bug]() if bug else contextlib.nullcontext():
        for seed in range(first, end):
            try:
                counters.add(simulator.run(seed))
            except Finding as finding:
                found.append((seed, str(finding)))
            except Exception as error:  # noqa: BLE001 - an exception of the product is a finding
                found.append((seed, f"seed {seed}: {type(error).__name__}: {error}"))
            if bug and found:
                break
    gc.enable()
    gc.collect()
    return counters, found


def _begin_process() -> None:
    gc.freeze()
    # All processes receive Ctrl-C; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_seeds(first: int, end: int, bug: str = "", jobs: int = 1) -> Iterator[tuple[Counters, list[tuple[int, str]]]]:
    chunks = [(start, min(start + CHUNK, end), bug) for start in range(first, end, CHUNK)]
    if jobs == 1:
        # Excludes the objects of this process from the garbage collections after worlds.
        gc.freeze()
        try:
            yield from map(run_chunk, chunks)
        finally:
            gc.unfreeze()
        return
    with multiprocessing.get_context("fork").Pool(jobs, initializer=_begin_process) as pool:
        yield from pool.imap(run_chunk, chunks)


def first_finding(results: Iterable[tuple[Counters, list[tuple[int, str]]]]) -> tuple[int, str] | None:
    return next((found[0] for _, found in results if found), None)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.list:
        for name, plant in BUGS.items():
            print(f"{name:24} {(plant.__doc__ or '').strip()}")
        return 0
    if options.seed is not None:
        return _run_one(options.seed, options.bug, trace=options.trace)
    return _run_many(options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=_range, default=(0, 3000), metavar="A:B", help="which worlds, B not included")
    parser.add_argument("--seed", type=int, metavar="N", help="one world")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all events of the world")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--break", dest="bug", default="", choices=("", *BUGS), metavar="NAME", help="plant a bug")
    parser.add_argument("--list", action="store_true", help="the bugs that can be planted")
    return parser.parse_args(arguments)


def _run_one(seed: int, bug: str, *, trace: bool) -> int:
    world = World(seed)
    with BUGS[bug]() if bug else contextlib.nullcontext():
        try:
            counters = world.run()
        except Finding as finding:
            print("\n".join([*world.trace_lines(), str(finding).splitlines()[0]]) if trace else finding)
            return 1
    print("\n".join(world.trace_lines()) if trace else counters)
    return 0


def _range(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"expected A:B with A below B, such as 0:3000, got {text!r}")
    return int(first), int(end)


def _run_many(options: argparse.Namespace) -> int:
    started, total, findings = time.monotonic(), Counters(), []
    is_interrupted = False
    try:
        with contextlib.closing(run_seeds(*options.seeds, options.bug, options.jobs)) as results:
            for counters, found in results:
                total.add(counters)
                for _, text in found[: max(0, SHOWN - len(findings))]:
                    print(text, "\n", flush=True)
                findings += found
                if found and options.bug:
                    break
    except KeyboardInterrupt:
        # An interrupted run prints its progress.
        is_interrupted = True
    seconds = time.monotonic() - started
    worlds = total.worlds + len(findings)
    print(f"{worlds} worlds in {seconds:.1f} s, {worlds / seconds:.0f} seeds/s in {options.jobs} processes")
    print(f"rounds delivered: {total.rounds}")
    print("faults: " + ", ".join(f"{name} {count}" for name, count in total.faults.most_common()))
    print("errors: " + ", ".join(f"{name} {count}" for name, count in total.errors.most_common()))
    if findings:
        print(f"{len(findings)} findings, at seeds {[seed for seed, _ in findings[:10]]}")
    if is_interrupted:
        print("interrupted")
    return int(bool(findings) or is_interrupted)


if __name__ == "__main__":
    sys.exit(main())
