"""GroupMemory: all members of a group on one host bring their rows, and everybody sees everybody's.

    memory.arrive(digest, rows, now)
    while not memory.wait(seconds):
        ...
    brought = memory.brought()

Members come to it in turns: a turn is over when all have come, and nobody leaves it with an answer before. So after it
all members know the same: the rows if they are all about the same thing and all fit, and otherwise that they are not to
be had here.
"""

import os
import threading
import time
from mmap import mmap

from client.shared_memory.futex import IS_WEAKLY_ORDERED, Futex, fence
from client.shared_memory.region import ENDED, GIVEN_UP, Brought, Region
from statsd_bn.rows import Rows

# How long to sleep before looking again, should a wake-up be lost.
SLICE_SECONDS = 0.002

# How long to look without sleeping, where there are more processors than members.
SPIN_SECONDS = 20e-6

_LOW_BITS = 2**32 - 1


class GroupMemory:
    """The memory of one group, as one member sees it.

    Args:
        memory: shared by the members; `region.size_of(members)` bytes, all zero at first.
        members: how many there are.
        me: which of them this is, from 0.

    Attributes:
        lock: for whoever takes a turn; one thread of a process at a time.
    """

    def __init__(self, memory: mmap, members: int, me: int) -> None:
        self.lock = threading.Lock()
        self._region = Region(memory, members, me)
        self._futex = Futex(memory, 0)
        self._number = 0
        # When this member came to this turn, and to the one before, in nanoseconds.
        self._came = self._came_before = 0
        self._spin_seconds = SPIN_SECONDS if members < len(os.sched_getaffinity(0)) else 0.0

    def arrive(self, digest: int, rows: Rows, now: float = 0.0) -> bool:
        """Comes to the next turn; returns whether all have come.

        Args:
            digest: of what it is about, 64 bits; the same for all members.
            rows: what this member brings.
            now: the time, by the clock that the processes of a host have in common.
        """
        self._came_before, self._came = self._came, int(1e9 * now)
        self._number += 1
        self._region.bring(self._number, digest, rows, self._came)
        if not self.have_all_come:
            return False
        self._futex.wake(self._number & _LOW_BITS)
        return True

    def wait(self, seconds: float) -> bool:
        """Waits until all have come, for so many seconds at most; returns whether they have.

        It ends at once, with False, when a member comes no more.
        """
        region, number = self._region, self._number
        started = time.perf_counter()
        while True:
            value = self._futex.value
            if IS_WEAKLY_ORDERED:
                fence()  # else it could be the value after the last wake-up, and the arrivals of before
            if region.have_all_come(number):
                return True
            waited = time.perf_counter() - started
            if waited >= seconds or region.is_closed:
                return False
            if waited >= self._spin_seconds:
                self._futex.sleep(value, min(SLICE_SECONDS, seconds - waited))

    @property
    def have_all_come(self) -> bool:
        """Whether all have come to this turn."""
        return self._region.have_all_come(self._number)

    @property
    def late(self) -> list[int]:
        """The members that have not come to this turn."""
        return self._region.late(self._number)

    @property
    def seconds_behind(self) -> float | None:
        """How much later than all others this member came to this turn, once all have come; None if others came later.

        None too where another process has another clock, as it may in a container, and for the first turn. All others
        came after this one had come to the turn before; what says otherwise is no time of ours.
        """
        behind = self._region.nanoseconds_behind(self._number)
        return behind / 1e9 if 0 <= behind <= self._came - self._came_before < self._came else None

    def tell(self) -> None:
        """Lets the others know that this member tells the server that it waits."""
        self._region.tell(self._number)

    @property
    def is_told(self) -> bool:
        """Whether some member, perhaps this one, may have told the server that it waits."""
        return self._region.is_told(self._number)

    def brought(self) -> Brought | None:
        """Returns what the members have brought, in order, once all have come.

        None where they have come for different things, or some rows did not fit: then it is None for all of them. The
        values may be a view, good until this member comes to the turn after the next one.
        """
        return self._region.brought(self._number)

    def close(self) -> None:
        """Comes to no further turn, and lets the others know."""
        self._close(GIVEN_UP)

    def end(self) -> None:
        """The same, since this member ends."""
        self._close(ENDED)

    @property
    def is_closed(self) -> bool:
        """Whether some member, perhaps this one, comes to no further turn."""
        return self._region.is_closed

    @property
    def is_given_up(self) -> bool:
        """Whether it is closed for those that go on: not if some member has only ended in good order."""
        return self._region.is_given_up

    def _close(self, reason: int) -> None:
        self._region.close(reason)
        # The word must change, by as much as no turns do.
        self._futex.wake((self._number + 2**31) & _LOW_BITS)
