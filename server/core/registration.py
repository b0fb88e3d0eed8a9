"""Registration: adds the sender of a Register message to its group, which may be new."""

import logging

from server.core.registry import GroupName, Registry, SessionRecord, failed_member
from server.group.lifecycle import GroupState
from server.group.master import SyncMaster
from server.group.membership import too_late_error
from server.group.rounds import Reply
from server.security.access import ANONYMOUS, Principal
from server.security.quota import QuotaUsage
from statsd_bn.errors import ProtocolError, ReplicaLost, StaleEpoch, StatsdBNError
from statsd_bn.messages import NO_SERVER, WORLD, Register, digest

logger = logging.getLogger("statsd_bn.server")


class Registration:
    """Registers sessions."""

    def __init__(self, server: bytes, registry: Registry, usage: QuotaUsage) -> None:
        self._server = server
        self._registry = registry
        self._usage = usage

    def register(self, now: float, register: Register, peer: bytes, principal: Principal) -> list[Reply]:
        """Register a session, or raise the reason of its refusal; returns the replies to its group."""
        name = (register.job, register.group)
        self._usage.check_members(register)
        if error := self._registry.tombstones.error_for(register.session, register.epoch):
            raise error
        self._check_session(register)
        if self._is_stale(register):
            return []
        self._check_ended(register)
        self._check_world(register)
        master = self._registry.masters.get(name)
        if master is None or self._is_replaced(master, register):
            return self._start_group(now, name, register, peer, principal)
        was_open = master.membership.is_open
        try:
            contributor, answers = master.register_slave(now, register, peer)
        except ReplicaLost as loss:
            self._registry.tombstones.add_session(register.session, register.epoch, loss)
            raise
        self._add(now, SessionRecord(master, contributor, principal.key), register, was_open=was_open)
        return answers

    def _start_group(
        self, now: float, name: GroupName, register: Register, peer: bytes, principal: Principal
    ) -> list[Reply]:
        """Start a group. If its first member is refused, the group that it would replace stays."""
        if name not in self._registry.masters:
            self._check_groups(name, principal)
        master = SyncMaster(self._server, register, self._usage, principal.tenant_of(register.job))
        try:
            contributor, answers = master.register_slave(now, register, peer)
        except StatsdBNError:
            master.release()
            raise
        reason = f"rank {register.member} ({register.place}) began a new run of the group"
        replies = [reply for replaced in self._replaced(name) for reply in self._registry.close(replaced, reason)]
        self._registry.masters[name] = master
        logger.info("job %r, group %r, epoch %d begins", *name, register.epoch)
        self._add(now, SessionRecord(master, contributor, principal.key), register, was_open=False)
        return replies + answers

    def _check_groups(self, name: GroupName, principal: Principal) -> None:
        """Raise LimitExceeded if the server or the tenant may have no further group."""
        masters, usage = self._registry.masters, self._usage
        if principal is not ANONYMOUS:
            tenant = principal.tenant_of(name[0])
            usage.check_tenant_groups(tenant, sum(master.tenant == tenant for master in masters.values()), len(masters))
        usage.check_groups(len(masters))

    def _add(self, now: float, record: SessionRecord, register: Register, *, was_open: bool) -> None:
        name, master, contributor = (register.job, register.group), record.master, record.contributor
        former = self._registry.sessions.get(register.session)
        if former is None or former.contributor is not contributor:
            contributor.since = now
        self._registry.add(register.session, record)
        if self._is_from_before(register):
            logger.info("job %r, group %r: %s registered again after the server restarted", *name, contributor)
        if master.membership.is_open and not was_open:
            logger.info("job %r, group %r is open with %d members", *name, master.nr_slaves)

    def _is_stale(self, register: Register) -> bool:
        """Whether a later message of the session arrived first; the member retries if it needs the answer."""
        record = self._registry.sessions.get(register.session)
        return record is not None and register.epoch == record.master.epoch and register.step < record.contributor.step

    def _check_ended(self, register: Register) -> None:
        """Refuse a member that reconnects after a server restart to a run that has ended since."""
        tombstones = self._registry.tombstones
        has_ended = tombstones.groups.get((register.job, register.group), -1) >= register.epoch
        if has_ended and self._is_from_before(register):
            loss = too_late_error(register)
            tombstones.add_session(register.session, register.epoch, loss)
            raise loss

    def _is_from_before(self, register: Register) -> bool:
        """Whether a member registers again after the server restarted."""
        return register.server not in {NO_SERVER, self._server}

    def _check_session(self, register: Register) -> None:
        """Refuse to register a session as two members or in two groups: a Leave would end only one."""
        record = self._registry.sessions.get(register.session)
        if record is None:
            return
        membership, now = record.master.membership, (register.job, register.group, register.member)
        before = (membership.job, membership.group, record.contributor.member)
        if now != before:
            name = digest(register.session).hex()
            raise ProtocolError(f"the session with digest {name}: registered as {before}, cannot also be {now}")

    def _check_world(self, register: Register) -> None:
        """Refuse to wait for a group that cannot open because a member of the world has failed."""
        masters = self._registry.masters
        world, group = masters.get((register.job, WORLD)), masters.get((register.job, register.group))
        if world is None or world is group or world.epoch != register.epoch or (group and group.membership.is_open):
            return
        if lost := failed_member(world):
            raise lost

    def _replaced(self, name: GroupName) -> list[GroupName]:
        """Groups that a new group replaces. A new world is a new run and replaces all groups of the job."""
        masters = self._registry.masters
        if name not in masters:
            return []
        return [other for other in masters if other[0] == name[0]] if name[1] == WORLD else [name]

    def _is_replaced(self, master: SyncMaster, register: Register) -> bool:
        """Whether a registration restarts the group: in a later epoch, or a new session of a broken group."""
        if register.epoch < master.epoch:
            raise StaleEpoch(
                f"job {register.job!r}, group {register.group!r}: expected epoch {master.epoch} or later, got "
                f"{register.epoch} from rank {register.member} ({register.place}); a newer run has started",
                job=register.job,
                group=register.group,
                expected=master.epoch,
                got=register.epoch,
            )
        is_new = register.session not in self._registry.sessions
        return register.epoch > master.epoch or (is_new and master.membership.state is GroupState.BROKEN)
