"""Compares the networks of torchvision and timm with themselves on the whole batch; `scripts/zoo` runs it."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeVar

import torch

from support.starter import STARTER
from zoo.catalogue import Survey, architectures, smallest, survey
from zoo.exhibits import Exhibit, exhibit

T = TypeVar("T")
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a network or family by its name, or a pattern such as 'resnet*'")
    parser.add_argument("--all", action="store_true", help="all networks, not only the smallest of each family")
    parser.add_argument("--list", action="store_true", help="only list the networks")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no network after this time")
    parser.add_argument("--jobs", type=int, default=2, help="networks at a time, each with one thread")
    options = parser.parse_args()
    began = time.monotonic()
    known = list(in_processes(survey, list(architectures(options.only)), options.jobs, _lost_survey))
    chosen = [one for one in known if one.layers] if options.all else smallest(known)
    _print(f"{len(chosen)} networks with batch norm of {len(known)}, found in {time.monotonic() - began:.0f} s")
    if options.list:
        for one in chosen:
            who = one.architecture
            _print(f"{who.library:<11} {who.name:<40} {one.parameters / 1e6:6.1f} M  {one.layers or one.problem}")
        return
    exhibits: list[Exhibit] = []
    # Small networks first, so that an interrupted run covers most.
    chosen.sort(key=lambda one: one.parameters)
    missing = list(chosen)
    for found in in_processes(exhibit, chosen, options.jobs, _lost_exhibit):
        exhibits += found
        missing = [one for one in missing if not _is_of(one, found)]
        for one in found:
            _print(str(one))
        if time.monotonic() - began > options.minutes * 60:
            break
    wrong = [one for one in exhibits if one.problem and not one.is_unfit]
    unfit = sum(one.is_unfit for one in exhibits)
    _print(
        f"{len(exhibits) - len(wrong) - unfit} agree, {len(wrong)} differ, {unfit} cannot be compared; "
        f"{time.monotonic() - began:.0f} s"
    )
    if missing:
        _print(f"not reached: {', '.join(sorted(one.architecture.name for one in missing))}")
    sys.exit(1 if wrong or missing or not exhibits else 0)


def _is_of(known: Survey, found: Sequence[Exhibit]) -> bool:
    who = known.architecture
    return any((one.library, one.name) == (who.library, who.name) for one in found)


def in_processes(
    work: Callable[[T], Result], things: Sequence[T], jobs: int, lost: Callable[[T], Result]
) -> Iterator[Result]:
    """Yields results as they come, and `lost(thing)` for a thing whose process is killed."""
    left = list(things)
    while left:
        done = []
        with ProcessPoolExecutor(jobs, mp_context=STARTER, initializer=_begin) as pool:
            futures: dict[Future[Any], T] = {pool.submit(work, thing): thing for thing in left}
            try:
                with suppress(BrokenProcessPool):
                    for future in as_completed(futures):
                        yield future.result()
                        done.append(futures[future])
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # if the consumer stops early
        left = [thing for thing in left if thing not in done]
        # If one of several processes was killed, its network is unknown, so a single process runs the rest.
        if left and jobs == 1:
            yield lost(left.pop(0))
        jobs = 1


def _begin() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # some networks make tensors of their own in the default type


def _lost_survey(architecture: Any) -> Survey:
    return Survey(architecture, problem="the process that made it was killed")


def _lost_exhibit(lost: Survey) -> list[Exhibit]:
    who = lost.architecture
    problem = "the process that compared it was killed"
    return [Exhibit(who.library, who.family, who.name, lost.layers, problem=problem)]


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
