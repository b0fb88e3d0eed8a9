"""Runs many worlds of shared memory; see scripts/simulate."""

import sys
import time

from simulation.memory_worlds import MemoryFinding, MemoryWorld


def main(arguments: list[str]) -> int:
    """Runs the worlds A:B; returns 1 if one of them fails."""
    first, end = map(int, arguments[0].split(":"))
    started, failed = time.monotonic(), 0
    for seed in range(first, end):
        try:
            MemoryWorld(seed).run()
        except MemoryFinding as finding:
            print(finding)
            failed += 1
    seconds = time.monotonic() - started
    print(f"{end - first} worlds of shared memory in {seconds:.1f} s, {failed} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
