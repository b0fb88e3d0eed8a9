"""Shared memory in a simulated world: the real `GroupMemory` and its core in C, and wake-ups that may be lost."""

from collections.abc import Callable
from mmap import mmap
from typing import TYPE_CHECKING

from client.native.library import WAITS
from client.transports.group_memory import GroupMemory, size_of
from statsd_bn.reduction import Rows

if TYPE_CHECKING:
    from simulation.simulated_member import Process
    from simulation.simulator import World

# The longest delay of a wake-up, and the chance that it is lost. As in reality, sleepers also check memory without one.
MOST_LATE_SECONDS = 0.002
LOST = 0.1

# Interval of a member's checks of the memory after the server learnt of its wait. Waits last up to a minute here, and
# each check is an event.
LISTEN_SECONDS = 0.25


# Maximum time for which the server may wrongly regard a member as waiting: the delay of a frame, and a tick.
MISTAKEN_SECONDS = 3.0


def check_waits(world: "World") -> None:
    """A member that has its rows from memory is not reported as waiting at the server."""
    plan = world.plan
    if not plan.in_memory or plan.weather.dropped or plan.has("cut", "vanished") or world.server.outages:
        return
    then = world.clock.now - MISTAKEN_SECONDS
    for master in world.server.dispatcher._registry.masters.values():
        for round_ in master.open_rounds.values():
            for process in world.processes:
                if process.number in round_.waiting and process.is_through(round_.key, then):
                    world.report("the server knows who waits", f"{process} does not wait in {round_.key}")


class SimulatedMemory:
    def __init__(self, world: "World", members: int) -> None:
        self._world = world
        self._bytes = mmap(-1, size_of(members))
        self._members = members
        self._sleepers: list[Process] = []

    def of_member(self, process: "Process", me: int) -> GroupMemory:
        self._sleepers.append(process)
        return _SimulatedGroupMemory(self._bytes, self._members, me, self._wake)

    def _wake(self) -> None:
        rng = self._world.rng
        for process in self._sleepers:
            if rng.random() >= LOST:
                self._world.clock.after(rng.random() * MOST_LATE_SECONDS, process.wake)


class _SimulatedGroupMemory(GroupMemory):
    def __init__(self, memory: mmap, members: int, me: int, wake: Callable[[], None]) -> None:
        super().__init__(memory, members, me)
        self._wake_others = wake

    def arrive(self, digest: int, rows: Rows, now: float = 0.0, _seconds: float = 0.0) -> int:
        found = super().arrive(digest, rows, now)
        if found != WAITS:
            self._wake_others()
        return found

    def close(self) -> None:
        super().close()
        self._wake_others()
