"""Runs many worlds of shared memory, of its rows and of its answers; see scripts/simulate."""

import sys
import time

from simulation.answer_worlds import AnswerWorld
from simulation.memory_worlds import MemoryFinding, MemoryWorld


def main(arguments: list[str]) -> int:
    """Runs the worlds A:B; returns 1 if one of them fails."""
    first, end = map(int, arguments[0].split(":"))
    started, failed = time.monotonic(), 0
    for seed in range(first, end):
        for world in (MemoryWorld, AnswerWorld):
            try:
                world(seed).run()
            except MemoryFinding as finding:
                print(f"{world.__name__}: {finding}")
                failed += 1
    seconds = time.monotonic() - started
    print(f"{2 * (end - first)} worlds of shared memory in {seconds:.1f} s, {failed} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
