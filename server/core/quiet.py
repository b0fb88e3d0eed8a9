"""Quiet: jobs that have had rounds, and have none for a while, although nobody has left.

A job is quiet between two epochs, while it validates or saves a checkpoint, and also where its members wait for one
another in collectives of torch: then nobody waits in a round, so nobody asks. The members of such a job are asked where
they are. What follows from the answers is up to `server.core.collectives`: of a healthy job nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from server.core.ended import Name
from server.group.master import SyncMaster
from server.membership.life import GroupState
from statsd_bn.messages import WORLD

# How long a job has had no round when its members are asked first. Steps may take as long: then each member is asked
# once in each of them, which takes it a tenth of a millisecond.
NO_ROUND_SECONDS = 2.0

# The members of a quiet job are asked so often at least, since what they do has changed meanwhile.
QUIET_ASKED_AT_MOST = 8.0

# A larger job is not asked: all answers are needed, and its rounds are not to wait for its questions.
MOST_QUIET_MEMBERS = 256


class QuietJobs:
    """Finds the jobs whose members are to be asked although nobody waits."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def tell(self, now: float, job: str) -> None:
        """Note that the members of a job are told of a mismatch; they are asked again once they have had a round."""
        self._told[job] = now

    def find(self, now: float, groups: Mapping[Name, SyncMaster]) -> Iterator[SyncMaster]:
        """The group of all members of each such job."""
        self._told = {job: at for job, at in self._told.items() if (job, WORLD) in groups}
        quiet = now - NO_ROUND_SECONDS
        worlds = [master for (_, group), master in groups.items() if group == WORLD and _may_be_asked(master, quiet)]
        if not worlds:
            return
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items():
            jobs[job].append(master)
        for world in worlds:
            masters = jobs[world.membership.job]
            latest = max(master.active for master in masters)
            is_told = self._told.get(world.membership.job, -math.inf) >= latest
            if latest <= quiet and not is_told and not any(map(_waits, masters)):
                yield world


def _may_be_asked(world: SyncMaster, quiet: float) -> bool:
    return (
        not world.membership.is_elastic
        and world.active <= quiet
        and world.rounds_done > 0
        and world.nr_slaves <= MOST_QUIET_MEMBERS
    )


def _waits(master: SyncMaster) -> bool:
    return bool(len(master.open_rounds)) or master.membership.state is not GroupState.OPEN
