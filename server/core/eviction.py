"""Eviction: which group ends when the server is full.

With keys the limits of each tenant leave room for the others. Without keys anybody can claim to be anybody, and whoever
comes first could keep all others out; so the group that looks least like a training makes room for a newcomer.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from operator import itemgetter

from server.core.ended import Name
from server.core.registry import Registry
from server.group.master import SyncMaster
from server.limits.access import ANYBODY, Tenant
from server.limits.quota import Budget
from server.rounds.rounds import Reply

# An eighth of all groups is kept for jobs at work: their members may need groups of their hosts.
RESERVE = 8

# A member is in a few groups. A connection that began more than one in so many of all groups wants to keep others out,
# even if all its groups are at work.
CROWD = 16


class Eviction:
    """Makes room for newcomers.

    Args:
        registry: the groups.
        budget: what there may be.
    """

    def __init__(self, registry: Registry, budget: Budget) -> None:
        self._registry = registry
        self._budget = budget

    def for_group(self, name: Name, tenant: Tenant) -> list[Reply]:
        """Make room for a new group of a tenant; returns the answers to the members of the groups that end.

        Raises:
            LimitExceeded: the tenant has too many groups, or no group ends for it.
        """
        masters, budget = self._registry.masters, self._budget
        if tenant is not ANYBODY:
            owner = tenant.owner(name[0])
            budget.check_tenant_groups(owner, sum(master.owner == owner for master in masters.values()), len(masters))
        jobs = {job for job, _ in masters}
        is_job_new = name[0] not in jobs
        is_at_work = any(master.rounds_done for (job, _), master in masters.items() if job == name[0])
        most = budget.quota.max_groups
        replies: list[Reply] = []
        if is_job_new and len(jobs) >= budget.quota.max_jobs:
            replies += self._end(tenant, jobs=True, what="jobs", most=budget.quota.max_jobs)
        if len(masters) >= (most if is_at_work else most - most // RESERVE):
            replies += self._end(tenant, jobs=False, what="groups", most=most)
        return replies

    def for_bytes(self, owner: str, size: int, *, has_key: bool) -> list[Reply]:
        """Make room for bytes of an owner that keeps less than others; returns the answers to those whose groups end.

        With keys no group ends for another tenant: each keeps what it has, up to its limit.
        """
        replies: list[Reply] = []
        while not has_key and self._budget.account.is_full(size) and (name := self._largest(owner, size)):
            replies += self._evict(name, "bytes kept in all", self._budget.account.most)
        return replies

    def _largest(self, owner: str, size: int) -> Name | None:
        """Largest group of the owner that keeps the most; None if that is this owner, with so many bytes more.

        Groups that never completed a round end first.
        """
        weak = self._largest_of(owner, size, lambda master: not master.rounds_done)
        return weak or self._largest_of(owner, size, lambda _: True)

    def _largest_of(self, owner: str, size: int, counts: Callable[[SyncMaster], bool]) -> Name | None:
        kept: dict[str, int] = defaultdict(int)
        for master in self._registry.masters.values():
            if counts(master):
                kept[master.owner] += master.kept
        most_of_one, its_owner = max(((size, name) for name, size in kept.items()), default=(0, ""))
        if most_of_one <= self._budget.kept(owner) + size:
            return None
        groups = self._registry.masters.items()
        return max((master.kept, name) for name, master in groups if master.owner == its_owner and counts(master))[1]

    def _end(self, tenant: Tenant, *, jobs: bool, what: str, most: int) -> list[Reply]:
        names = self._weakest(jobs=jobs) if tenant is ANYBODY else []
        if not names:
            raise self._budget.exceeded(f"the server has as many {what} as it may have, {most}", most, what)
        return [reply for name in names for reply in self._evict(name, what, most)]

    def _weakest(self, *, jobs: bool) -> list[Name]:
        """The group to end, or with `jobs` all groups of the job to end.

        It is the oldest of those that never completed a round and that the connection with the most such groups began.
        """
        masters, founders = self._registry.masters, self._registry.founders
        at_work = {name for name, master in masters.items() if master.rounds_done}
        if jobs:
            jobs_at_work = {job for job, _ in at_work}
            at_work = {name for name in masters if name[0] in jobs_at_work}
        weak = [name for name in masters if name not in at_work]
        candidates = weak or list(masters)
        founder, began = max(Counter(founders[name] for name in candidates).items(), key=itemgetter(1))
        if not weak and began <= self._budget.quota.max_groups // CROWD:
            return []
        weakest = next(name for name in candidates if founders[name] == founder)
        return [name for name in masters if name[0] == weakest[0]] if jobs else [weakest]

    def _evict(self, name: Name, what: str, most: int) -> list[Reply]:
        job, group = name
        text = f"job {job!r}, group {group!r}: ended to make room for others; the server has a limit of {most} {what}"
        return self._registry.evict(name, self._budget.exceeded(text, most, what))
