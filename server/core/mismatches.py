"""Mismatches: when to search which job for members that wait for one another, in a bounded part of the server's time.

Searching a job takes time in proportion to the contributions that it waits for, and to the ranks of the collectives of
torch that its members say they are in. Most jobs wait for few.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from server.core import deadlock
from server.core.collectives import held_members, ranks_told
from server.core.ended import Name
from server.group.master import SyncMaster
from server.membership.contributor import Contributor
from statsd_bn.limits import SILENCE_SECONDS

# A job that waits for at most so many is searched each time: 60 µs.
FEW = 256

# One contribution takes a quarter of a microsecond. A job is searched for a twentieth of the time at most, and all
# together for 30 ms at a time.
PAUSE_SECONDS_EACH = 5e-6
MOST = 2**17

# So many ranks of a collective take as long as one contribution: 70 ns each.
RANKS_OF_ONE = 4

NOBODY_ASKED: Mapping[str, Sequence[Contributor]] = MappingProxyType({})


class Mismatches:
    """Finds members that wait for one another.

    A job that waits for more than `MOST` contributions at a time is not searched: its rounds end at their deadlines.

    Args:
        silence: how long a member may be silent, in seconds.
    """

    def __init__(self, silence: float = SILENCE_SECONDS) -> None:
        self._silence = silence
        self._due: dict[str, float] = {}

    def find(
        self, now: float, groups: Mapping[Name, SyncMaster], asked: Mapping[str, Sequence[Contributor]] = NOBODY_ASKED
    ) -> Iterator[list[deadlock.Wait]]:
        """Where members are stuck, for each job that has such members; call it often.

        Args:
            now: the time.
            groups: all groups of all jobs.
            asked: by job, the members that have been asked where they are.
        """
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items():
            jobs[job].append(master)
        self._due = {job: due for job, due in self._due.items() if job in jobs}
        left = MOST
        for job in sorted(jobs, key=lambda job: self._due.get(job, 0.0)):
            contributors = asked.get(job, ())
            size = sum(master.nr_slaves * (1 + len(master.open_rounds)) for master in jobs[job])
            size += ranks_told(contributors) // RANKS_OF_ONE
            if size > FEW:
                if now < self._due.get(job, 0.0) or size > left:
                    continue
                left -= size
                self._due[job] = now + size * PAUSE_SECONDS_EACH
            if waits := deadlock.find(jobs[job], now, held_members(contributors, self._silence)):
                yield waits
