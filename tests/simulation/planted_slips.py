"""Slips that are planted into the code of shared memory, and whether its worlds find them."""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from unittest import mock

from simulation.memory_worlds import MemoryFinding, MemoryWorld

# So many worlds are tried.
WITHIN = 5000

Plant = Callable[[], AbstractContextManager[object]]


def no_fence_in(function: FunctionType, nth: int = 1) -> Plant:
    """Stores and looks of one function pass one another, at one of its fences."""
    lines, first = inspect.getsourcelines(function)
    fences = [number for number, line in enumerate(lines, first) if line.strip().startswith("fence()")]
    there, fence = (function.__code__, fences[nth - 1]), MemoryWorld._fence

    def but_there(self):
        frame = sys._getframe(1)
        if (frame.f_code, frame.f_lineno) != there:
            fence(self)

    return lambda: mock.patch.object(MemoryWorld, "_fence", but_there)


def is_found(plant: Plant, found_last: int = 0) -> bool:
    """Whether one of the worlds finds it; that of the seed which did so last is tried first."""
    with plant():
        return any(_fails(MemoryWorld(seed)) for seed in (found_last, *range(WITHIN)))


def _fails(world: MemoryWorld) -> bool:
    try:
        world.run()
    except MemoryFinding:
        return True
    return False
