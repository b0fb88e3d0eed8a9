"""EndedJobs: what became of the latest jobs, for those who ask for the status some minutes later.

The number is bounded, and so is the time: this is for people who look now, and no history.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from server.group.master import SyncMaster
from server.limits.access import Tenant
from statsd_bn import limits
from statsd_bn.error_text import in_log
from statsd_bn.messages import WORLD

# How many are remembered, of all owners together, and for how long.
REMEMBERED_JOBS = 32
REMEMBERED_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Job:
    job: str
    epoch: int
    world_size: int
    rounds_done: int
    lost: str
    ended: float
    owner: str


class EndedJobs:
    """The latest jobs that have ended: all their members have left or are lost.

    Whoever has many forgets their own first, so that nobody can make the server forget those of others.
    """

    def __init__(self) -> None:
        self._jobs: list[_Job] = []

    def add(self, now: float, master: SyncMaster) -> None:
        """Remember a group that has ended, if it is all of a job."""
        membership = master.membership
        if membership.group == WORLD:
            lost, done = _why_broken(master), master.rounds_done
            self._jobs.append(_Job(membership.job, master.epoch, membership.world_size, done, lost, now, master.owner))
            if len(self._jobs) > REMEMBERED_JOBS:
                self._forget_one()

    def _forget_one(self) -> None:
        """Forget the oldest job of the owner that has most."""
        numbers = Counter(job.owner for job in self._jobs)
        most = max(numbers.values())
        del self._jobs[next(place for place, job in enumerate(self._jobs) if numbers[job.owner] == most)]

    def told(self, now: float, tenant: Tenant) -> list[dict[str, Any]]:
        """Entries of a report about those that a tenant may see, the latest first."""
        return [
            {
                "job": job.job,
                "epoch": job.epoch,
                "world_size": job.world_size,
                "rounds_done": job.rounds_done,
                "lost": job.lost,
                "seconds": now - job.ended,
            }
            for job in reversed(self._jobs)
            if now - job.ended < REMEMBERED_SECONDS and tenant.may(job.job)
        ]


def _why_broken(master: SyncMaster) -> str:
    """Why a job was broken; "" if all have left in good order, which they do one after the other."""
    lost = master.membership.lost
    rounds = master.open_rounds
    if lost is None or (lost.fields.get("cause") == "" and not (rounds.failed or rounds.was_refused)):
        return ""
    return in_log(lost)[: limits.MAX_NAME_BYTES]
