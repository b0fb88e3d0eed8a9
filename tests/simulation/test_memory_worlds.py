"""The worlds of shared memory: none of them fails, and each slip that is planted is found."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import pytest

from client.shared_memory import futex, region
from client.shared_memory.group_memory import GroupMemory
from client.shared_memory.region import Region
from simulation.memory_worlds import FENCED, MemoryWorld, SimulatedFutex
from simulation.planted_slips import is_found, no_fence_in
from support.paths import ROOT

SHARED_MEMORY = ROOT / "client" / "shared_memory"

WORLDS = 60

NO_FENCE_BEFORE_AN_ARRIVAL = "no fence before an arrival"

# Where it takes long: the seed that found a slip last.
FOUND_LAST = {NO_FENCE_BEFORE_AN_ARRIVAL: 1823}


def test_no_world_fails():
    for seed in range(WORLDS):
        MemoryWorld(seed).run()


def arrival_before_rows() -> AbstractContextManager[object]:
    """A member says that it has come, and then writes what it brings."""
    bring = Region.bring

    def early(self, number, *brought):
        self._words[self._arrivals[self._me]] = number
        bring(self, number, *brought)

    return mock.patch.object(Region, "bring", early)


def one_in_place_of_two(*names: str) -> Callable[[], AbstractContextManager[object]]:
    """Who is quick writes over what another reads."""
    begin = Region.__init__

    def begin_with_one(self, *arguments):
        begin(self, *arguments)
        for name in names:
            setattr(self, name, getattr(self, name)[:1] * 2)

    return lambda: mock.patch.object(Region, "__init__", begin_with_one)


def time_after_arrival() -> AbstractContextManager[object]:
    """A member says that it has come, and then when."""
    bring = Region.bring

    def late(self, number, digest, rows, came):
        place = self._came[number % 2][self._me]
        bring(self, number, digest, rows, self._words[place])
        self._words[place] = came

    return mock.patch.object(Region, "bring", late)


def counts_not_written_again() -> AbstractContextManager[object]:
    """Rows of a shape that was in the slot before have the counts of then."""
    write = Region._write_sizes

    def write_those_of_then(self, slot, rows):
        then = vars(self).setdefault("_then", {}).setdefault((slot, rows.values.shape), rows)
        write(self, slot, then)

    return mock.patch.object(Region, "_write_sizes", write_those_of_then)


def shape_not_written_again() -> AbstractContextManager[object]:
    """Rows in a slot have the shape of the first ones there."""
    write = Region._write_sizes

    def write_that_of_then(self, slot, rows):
        then = vars(self).setdefault("_then", {}).setdefault(slot, rows.values.shape)
        write(self, slot, rows)
        first = self._own[slot] // region.WORD_BYTES + 1
        for place, size in enumerate(then, first):
            self._words[place] = size

    return mock.patch.object(Region, "_write_sizes", write_that_of_then)


def wake_up_lost() -> AbstractContextManager[object]:
    """Nobody is woken."""
    return mock.patch.object(SimulatedFutex, "wake", return_value=0)


def woken_before_the_word() -> AbstractContextManager[object]:
    """Sleepers are woken before the word says why: whoever is about to sleep sleeps on."""

    def wake(self, value):
        woken = self._world.wake()
        self._view[-1] = value
        return woken

    return mock.patch.object(SimulatedFutex, "wake", wake)


def keys_not_compared() -> AbstractContextManager[object]:
    """Members that have come for different rounds take one another's rows."""
    arrive = GroupMemory.arrive
    return mock.patch.object(GroupMemory, "arrive", lambda self, _digest, rows, now: arrive(self, 1, rows, now))


def reader_overtaken() -> AbstractContextManager[object]:
    """A turn is taken to be over when all have come to the one before."""
    have_all_come = Region.have_all_come
    return mock.patch.object(Region, "have_all_come", lambda self, number: have_all_come(self, number - 1))


def no_look_after_the_word() -> AbstractContextManager[object]:
    """Who waits looks at the word after it has looked who has come."""

    def wait(self, _seconds):
        while not self.have_all_come:
            self._futex.sleep(self._futex.value, 0.0)
        return True

    return mock.patch.object(GroupMemory, "wait", wait)


@pytest.mark.parametrize(
    "plant",
    [
        arrival_before_rows,
        pytest.param(no_fence_in(Region.bring, 1), id=NO_FENCE_BEFORE_AN_ARRIVAL),
        pytest.param(no_fence_in(Region.bring, 2), id="no fence behind an arrival"),
        pytest.param(no_fence_in(Region.have_all_come), id="no fence in have_all_come"),
        pytest.param(no_fence_in(GroupMemory.wait), id="no fence in wait"),
        pytest.param(one_in_place_of_two("_own", "_slots"), id="one slot"),
        pytest.param(one_in_place_of_two("_came"), id="one time"),
        time_after_arrival,
        counts_not_written_again,
        shape_not_written_again,
        wake_up_lost,
        woken_before_the_word,
        keys_not_compared,
        reader_overtaken,
        no_look_after_the_word,
    ],
)
def test_a_planted_slip_is_found(plant, request):
    assert is_found(plant, FOUND_LAST.get(request.node.callspec.id, 0))


def test_the_modules_that_are_patched_use_what_is_patched():
    """Else the worlds would have no fences."""
    assert {module.fence for module in FENCED} == {futex.fence}
    assert {module.IS_WEAKLY_ORDERED for module in FENCED} == {futex.IS_WEAKLY_ORDERED}
    modules = [importlib.import_module(f"client.shared_memory.{path.stem}") for path in SHARED_MEMORY.glob("*.py")]
    assert {module for module in modules if hasattr(module, "fence")} == {futex, *FENCED}
