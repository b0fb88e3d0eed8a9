"""Meetings: all members of a group on one host bring their rows, and everybody sees everybody's.

    meeting.arrive(digest, rows)
    while not meeting.wait(seconds):
        ...
    rows = meeting.rows()

A meeting is over when all have come; nobody leaves it with an answer before. So after it all members know the same: the
rows if they are all about the same thing and all fit, and otherwise that they are not to be had here.
"""

import os
import threading
import time
from mmap import mmap

from client.shared_memory.futex import Futex, fence
from client.shared_memory.region import Region
from statsd_bn.rows import Rows

# How long to sleep before looking again, should a wake-up be lost.
SLICE_SECONDS = 0.002

# How long to look without sleeping, where there are more processors than members.
SPIN_SECONDS = 20e-6

_LOW_BITS = 2**32 - 1


class Meetings:
    """The meetings of one group, one after the other, as one member sees them.

    Args:
        memory: shared by the members; `region.size_of(members)` bytes, all zero at first.
        members: how many there are.
        me: which of them this is, from 0.

    Attributes:
        lock: for whoever meets; one thread of a process at a time.
    """

    def __init__(self, memory: mmap, members: int, me: int) -> None:
        self.lock = threading.Lock()
        self._region = Region(memory, members, me)
        self._futex = Futex(memory, 0)
        self._number = 0
        self._digest = 0
        self._spin_seconds = SPIN_SECONDS if members < len(os.sched_getaffinity(0)) else 0.0

    def arrive(self, digest: int, rows: Rows) -> None:
        """Comes to the next meeting.

        Args:
            digest: of what it is about, 64 bits; the same for all members.
            rows: what this member brings.
        """
        self._number += 1
        self._digest = digest
        self._region.bring(self._number, digest, rows)
        if self._region.have_all_come(self._number):
            self._futex.wake(self._number & _LOW_BITS)

    def wait(self, seconds: float) -> bool:
        """Waits until all have come, for so many seconds at most; returns whether they have.

        It ends at once, with False, when a member comes no more.
        """
        region, number = self._region, self._number
        started = time.perf_counter()
        while True:
            value = self._futex.value
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
        """Whether all have come to the meeting."""
        return self._region.have_all_come(self._number)

    def rows(self) -> list[Rows] | None:
        """Returns what the members have brought, in order, once all have come.

        None where they have come for different things, or some rows did not fit: then it is None for all of them. The
        values are views, good until this member comes to the meeting after the next.
        """
        brought = self._region.brought(self._number)
        rows = [one.rows for one in brought if one.digest == self._digest and one.rows is not None]
        return rows if len(rows) == len(brought) else None

    def close(self) -> None:
        """Comes to no further meeting, and lets the others know."""
        self._region.close()
        self._futex.wake((self._number + 2**31) & _LOW_BITS)

    @property
    def is_closed(self) -> bool:
        """Whether some member, perhaps this one, comes to no further meeting."""
        return self._region.is_closed
