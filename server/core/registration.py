"""Registration: from a Register message to a registered session, in a group that exists or a new one."""

import logging

from server.core.registry import Name, Registry, SessionRecord, failed_member
from server.group.admission import too_late
from server.group.lifecycle import GroupState
from server.group.master import SyncMaster
from server.group.rounds import Reply
from server.security.access import ANYBODY, Tenant
from server.security.quota import Budget
from statsd_bn.errors import ProtocolError, ReplicaLost, StaleEpoch, StatsdBNError
from statsd_bn.messages import NO_SERVER, WORLD, Register
from statsd_bn.tokens import digest

logger = logging.getLogger("statsd_bn.server")


class Registration:
    """Registers sessions.

    Args:
        server: the random id of this life of the server.
        registry: the groups and the registered sessions.
        budget: how many groups and members there may be.
    """

    def __init__(self, server: bytes, registry: Registry, budget: Budget) -> None:
        self._server = server
        self._registry = registry
        self._budget = budget

    def register(self, now: float, register: Register, peer: bytes, tenant: Tenant) -> list[Reply]:
        """Register a session; returns the answers to its group.

        Raises:
            StatsdBNError: it is refused; the error says why.
        """
        name = (register.job, register.group)
        self._budget.check_registration(register)
        if error := self._registry.ended.why(register.session, register.epoch):
            raise error
        self._check_session(register)
        if self._is_late(register):
            return []
        self._check_end(register)
        self._check_world(register)
        master = self._registry.masters.get(name)
        if master is None or self._is_replaced(master, register):
            return self._begin(now, name, register, peer, tenant)
        was_open = master.membership.is_open
        try:
            contributor, told = master.register_slave(now, register, peer)
        except ReplicaLost as loss:
            self._registry.ended.end_session(register.session, register.epoch, loss)
            raise
        self._add(now, SessionRecord(master, contributor, tenant.key), register, was_open=was_open)
        return told

    def _begin(self, now: float, name: Name, register: Register, peer: bytes, tenant: Tenant) -> list[Reply]:
        """Begin a group; one whose first member is refused replaces no other."""
        if name not in self._registry.masters:
            self._check_groups(name, tenant)
        master = SyncMaster(self._server, register, self._budget, tenant.owner(register.job))
        try:
            contributor, told = master.register_slave(now, register, peer)
        except StatsdBNError:
            master.retire()
            raise
        reason = f"a new run of the group was begun by rank {register.member} ({register.place})"
        replies = [reply for replaced in self._replaced(name) for reply in self._registry.close(replaced, reason)]
        self._registry.masters[name] = master
        logger.info("job %r, group %r, epoch %d begins", *name, register.epoch)
        self._add(now, SessionRecord(master, contributor, tenant.key), register, was_open=False)
        return replies + told

    def _check_groups(self, name: Name, tenant: Tenant) -> None:
        """Refuse another group, with LimitExceeded, if the server or the tenant has as many as it may have."""
        masters, budget = self._registry.masters, self._budget
        if tenant is not ANYBODY:
            owner = tenant.owner(name[0])
            budget.check_tenant_groups(owner, sum(master.owner == owner for master in masters.values()), len(masters))
        jobs = {job for job, _ in masters}
        budget.check_groups(len(masters), len(jobs), is_job_new=name[0] not in jobs)

    def _add(self, now: float, record: SessionRecord, register: Register, *, was_open: bool) -> None:
        name, master, contributor = (register.job, register.group), record.master, record.contributor
        former = self._registry.sessions.get(register.session)
        if former is None or former.contributor is not contributor:
            contributor.since = now
        self._registry.add(register.session, record)
        if register.server not in {NO_SERVER, self._server}:
            logger.info("job %r, group %r: %s comes from an earlier life of this server", *name, contributor)
        if master.membership.is_open and not was_open:
            logger.info("job %r, group %r is open with %d members", *name, master.nr_slaves)

    def _is_late(self, register: Register) -> bool:
        """Whether a later message of the session has overtaken it; the member asks again if it needs the answer."""
        record = self._registry.sessions.get(register.session)
        return record is not None and register.epoch == record.master.epoch and register.step < record.contributor.step

    def _check_end(self, register: Register) -> None:
        """Refuse a member that comes from before a restart of the server, to a run that ended after it."""
        ended = self._registry.ended
        comes_from_before = register.server not in {NO_SERVER, self._server}
        if comes_from_before and ended.has_ended((register.job, register.group), register.epoch):
            loss = too_late(register)
            ended.end_session(register.session, register.epoch, loss)
            raise loss

    def _check_session(self, register: Register) -> None:
        """Refuse a session that is registered as another member, or in another group: leaving would end only one."""
        record = self._registry.sessions.get(register.session)
        if record is None:
            return
        membership = record.master.membership
        now, before = (
            (register.job, register.group, register.member),
            (membership.job, membership.group, record.contributor.member),
        )
        if now != before:
            name = digest(register.session).hex()
            raise ProtocolError(f"the session with digest {name}: registered as {before}, cannot also be {now}")

    def _check_world(self, register: Register) -> None:
        """Refuse to wait for a group that cannot open because a member of the job has failed."""
        masters = self._registry.masters
        world = masters.get((register.job, WORLD))
        if register.group == WORLD or world is None or world.epoch != register.epoch:
            return
        group = masters.get((register.job, register.group))
        stands = group is not None and group.membership.is_open
        if (lost := failed_member(world)) and not stands:
            raise lost

    def _replaced(self, name: Name) -> list[Name]:
        """Groups that a new group replaces: a new world is a new run, and replaces all groups of the job."""
        masters = self._registry.masters
        if name not in masters:
            return []
        return [other for other in masters if other[0] == name[0]] if name[1] == WORLD else [name]

    def _is_replaced(self, master: SyncMaster, register: Register) -> bool:
        """Whether a registration begins the group anew: a later epoch does, and any new session once it is broken."""
        if register.epoch < master.epoch:
            raise StaleEpoch(
                f"job {register.job!r}, group {register.group!r}: expected epoch {master.epoch} or later, got "
                f"{register.epoch} from rank {register.member} ({register.place})",
                job=register.job,
                group=register.group,
                expected=master.epoch,
                got=register.epoch,
            )
        newcomer = register.session not in self._registry.sessions
        return register.epoch > master.epoch or (newcomer and master.membership.state is GroupState.BROKEN)
