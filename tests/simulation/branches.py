"""Compares compiled random networks on ranks with the whole batch; `scripts/simulate branches` runs it."""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import client
from conftest import running_server
from programs import branch_programs
from support import branch_networks
from support.branch_networks import Network, Results

TOLERANCE = 1e-9

# Number of networks between two lines about the progress.
PROGRESS_NETWORKS = 10


def differences(network: Network, ranks: list[Results]) -> list[str]:
    """Differences of the ranks' results from the whole batch's; parameter gradients are summed over the ranks."""
    found = []
    for name, expected in branch_networks.whole_batch(network).items():
        here = [result[name] for result in ranks if name in result]
        if name.startswith("gradient "):
            here = [sum(here)]
        largest = max((float(np.abs(one - expected).max(initial=0.0)) for one in here), default=np.inf)
        if not largest <= TOLERANCE * (1 + float(np.abs(expected).max(initial=0.0))):
            found.append(f"{name}: off by {largest:.2g}")
    return found


def _as_rank(endpoint: str, seed: int, rank: int, ranks: int, backend: str) -> Results:
    given = {"job": f"{backend}-{ranks}-{seed}", "rank": rank, "world_size": ranks}
    with client.connect(endpoint, round_timeout=300.0, **given) as connection:
        return branch_programs.train(connection, seed, ranks, backend)


def order_faults(seed: int, ranks: int) -> list[str]:
    """The ranks whose rounds come in another order than the program's; needs no C++ compiler."""
    network = Network(seed, ranks)
    with branch_programs.without_machine_code():
        found = branch_programs.rounds_of(network, is_compiled=True)
    (expected, *_) = branch_programs.rounds_of(network, is_compiled=False)
    return [f"rank {rank}: {order}, expected {expected}" for rank, order in enumerate(found) if order != expected]


def _with_server(arguments: argparse.Namespace, play: Callable[[Callable[[int, int], list[str]]], int]) -> int:
    context = multiprocessing.get_context("spawn")
    silence = ("--silence-seconds", "300")  # a compiler holds Python's lock
    with running_server(*silence) as server, ProcessPoolExecutor(max(arguments.ranks), mp_context=context) as pool:

        def faults(seed: int, ranks: int) -> list[str]:
            given = [(server.endpoint, seed, rank, ranks, arguments.backend) for rank in range(ranks)]
            futures = [pool.submit(_as_rank, *each) for each in given]
            try:
                return differences(Network(seed, ranks), [future.result() for future in futures])
            except Exception as error:  # noqa: BLE001 - continue with the next network
                return [repr(error)]

        return play(faults)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate branches", description=__doc__)
    parser.add_argument("--networks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first network")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="numbers of ranks, used in turn")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--order-only", action="store_true", help="compare the order of rounds, without a C++ compiler")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no network after this time")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def play(faults: Callable[[int, int], list[str]]) -> int:
        failed = played = 0
        end = time.monotonic() + 60 * arguments.minutes
        for seed in range(arguments.seed, arguments.seed + arguments.networks):
            if time.monotonic() > end:
                break
            ranks = arguments.ranks[seed % len(arguments.ranks)]
            found = faults(seed, ranks)
            played += 1
            failed += bool(found)
            for line in found:
                print(f"seed {seed}, {ranks} ranks: {line}", flush=True)  # noqa: T201
            if played % PROGRESS_NETWORKS == 0:
                print(f"{played} networks so far: {failed} failed", flush=True)  # noqa: T201
        print(f"{played} networks from seed {arguments.seed}: {failed} failed", flush=True)  # noqa: T201
        return min(failed, 100)

    return play(order_faults) if arguments.order_only else _with_server(arguments, play)


if __name__ == "__main__":
    sys.exit(main())
