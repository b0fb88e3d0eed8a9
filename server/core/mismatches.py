"""Mismatches: when to search which job for members that wait for one another, in a bounded part of the server's time.

Searching a job takes time in proportion to the contributions that it waits for, and most jobs wait for few.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from server.core import deadlock
from server.core.collectives import Held
from server.core.ended import Name
from server.group.master import SyncMaster

# A job that waits for at most so many is searched each time: 60 µs.
FEW = 256

# One contribution takes a quarter of a microsecond. A job is searched for a twentieth of the time at most, and all
# together for 30 ms at a time.
PAUSE_SECONDS_EACH = 5e-6
MOST = 2**17

NOBODY_HELD: Mapping[str, Sequence[Held]] = MappingProxyType({})


class Mismatches:
    """Finds members that wait for one another.

    A job that waits for more than `MOST` contributions at a time is not searched: its rounds end at their deadlines.
    """

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def find(
        self, now: float, groups: Mapping[Name, SyncMaster], held: Mapping[str, Sequence[Held]] = NOBODY_HELD
    ) -> Iterator[list[deadlock.Wait]]:
        """Where members are stuck, for each job that has such members; call it often.

        Args:
            now: the time.
            groups: all groups of all jobs.
            held: by job, the members that wait in a collective of torch.
        """
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items():
            jobs[job].append(master)
        self._due = {job: due for job, due in self._due.items() if job in jobs}
        left = MOST
        for job in sorted(jobs, key=lambda job: self._due.get(job, 0.0)):
            size = sum(master.nr_slaves * (1 + len(master.open_rounds)) for master in jobs[job])
            if size > FEW:
                if now < self._due.get(job, 0.0) or size > left:
                    continue
                left -= size
                self._due[job] = now + size * PAUSE_SECONDS_EACH
            if waits := deadlock.find(jobs[job], now, held.get(job, ())):
                yield waits
