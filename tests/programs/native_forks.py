"""Forks repeatedly while another thread computes in the native core; all processes compute equal sums, and end."""

import ctypes
import os
import random
import signal
import sys
import threading
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

# Loaded from its file: the package imports torch, whose teardown takes a second in each child.
sys.path.insert(0, str(Path(__file__).parents[2]))
library = SimpleNamespace(**run_path(str(Path(__file__).parents[2] / "client" / "native" / "library.py")))

FORKS, SECONDS = 15, 60
SAMPLES, CHANNELS, POSITIONS = 8, 16, 2048

core = library.load(library.PATH)[0]
assert core
values = (ctypes.c_float * (SAMPLES * CHANNELS * POSITIONS))()
chance = random.Random(0)
values[:] = [chance.random() for _ in values]


def sums(threads: int) -> bytes:
    row = (ctypes.c_double * (2 * CHANNELS + 1))()
    plan = ctypes.byref(library.Plan(SAMPLES, CHANNELS, POSITIONS, library.F32, 0, threads))
    tensors = row, None, values, *[None] * 6
    assert core.releasing.sbn_forward(plan, *tensors, library.MEASURE, None, 0, 0) == library.DONE
    return bytes(row)


def compute() -> None:
    while True:
        sums(3)


def main() -> None:
    signal.alarm(SECONDS)
    expected = sums(1)
    threading.Thread(target=compute, daemon=True).start()
    for _ in range(FORKS):
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            sys.exit(any(sums(3) != expected for _ in range(3)))
        assert os.waitpid(child, 0)[1] == 0
        assert sums(3) == expected
    sys.stdout.write("all equal\n")


main()
