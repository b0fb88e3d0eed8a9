"""Registry: all groups of all jobs, and their registered sessions.

A session is registered in one group. A group is removed with its last session. The registry remembers the errors of
ended sessions and the epochs of ended groups, so that a late message does not start them again, and the latest ended
jobs for the status report. All three memories are bounded and evict their oldest entries.
"""

import logging
from collections import deque
from typing import Any

from server.core.liveness import Session, Sessions
from server.group.contributor import Contributor
from server.group.lifecycle import GroupState
from server.group.master import SyncMaster
from server.group.membership import too_late_error
from server.group.rounds import Reply
from server.security.access import ANONYMOUS, Principal
from server.security.quota import QuotaUsage
from statsd_bn import limits
from statsd_bn.errors import ProtocolError, RegistrationRefused, ReplicaLost, RoundMismatch, StaleEpoch, StatsdBNError
from statsd_bn.messages import NO_SERVER, WORLD, Register, digest, unknown_session
from statsd_bn.text import log_line
from statsd_bn.wire import encode_failure

logger = logging.getLogger("statsd_bn.server")

# Ended sessions and groups that are remembered: the members of a large job may end at the same time.
REMEMBERED_SESSIONS, REMEMBERED_GROUPS = 32_768, 4096

# Maximum number of ended jobs in the report, and how long each stays there.
REMEMBERED_JOBS, REMEMBERED_SECONDS = 32, 600.0

# A launcher stops a broken job's processes within this time; without a launcher blocked ranks end after `abort_after`.
LAUNCHER_STOP_SECONDS = 5.0

GroupName = tuple[str, str]  # a job, and the name of a group


class Registry:
    """Groups and registered sessions."""

    def __init__(self, server: bytes, started: float, usage: QuotaUsage) -> None:
        self.masters: dict[GroupName, SyncMaster] = {}
        self.sessions = Sessions(started, usage.quota.silence_seconds)
        self.has_had_members = False
        self._server = server
        self._usage = usage
        # The error and the last epoch of each ended session, which may register again in a later epoch.
        self._ended_sessions: dict[bytes, tuple[StatsdBNError, int]] = {}
        self._ended_groups: dict[GroupName, int] = {}  # the epochs of groups that all members have left
        # The time of the end, and the entry of the report.
        self._ended_jobs: deque[tuple[float, dict[str, Any]]] = deque(maxlen=REMEMBERED_JOBS)

    def error_for(self, session: bytes) -> StatsdBNError:
        """Error for an unregistered session: the reason of its end, or `unknown session`."""
        return self._ended_sessions[session][0] if session in self._ended_sessions else unknown_session(session)

    def ended_jobs(self, now: float, principal: Principal) -> list[dict[str, Any]]:
        """Report entries of the ended jobs that a key may see, latest first."""
        latest = [(ended, entry) for ended, entry in reversed(self._ended_jobs) if now - ended < REMEMBERED_SECONDS]
        return [{**entry, "seconds": now - ended} for ended, entry in latest if principal.may_access(entry["job"])]

    def register(self, now: float, register: Register, peer: bytes, principal: Principal) -> list[Reply]:
        """Register a session, or raise the reason of its refusal; returns the replies to its group."""
        self._usage.check_members(register)
        error, last = self._ended_sessions.get(register.session, (None, 0))
        if error and register.epoch <= last:
            raise error
        if self._is_stale(register):
            return []
        self._check_ended(register)
        self._check_world(register)
        master = self.masters.get((register.job, register.group))
        if master is None or _is_replaced(master, register, is_new=register.session not in self.sessions):
            return self._start_group(now, register, peer, principal)
        was_open = master.membership.is_open
        try:
            replies = master.register_slave(now, register, peer)[1]
        except ReplicaLost as loss:
            self._remember_session(register.session, register.epoch, loss)
            raise
        self._add(now, master, register, peer, principal.key, was_open=was_open)
        return replies

    def _is_stale(self, register: Register) -> bool:
        """Whether a later message of the session arrived first; the member retries if it needs the answer.

        Raises ProtocolError for a session of another member or group: a Leave would end only one of two registrations.
        """
        session = self.sessions.get(register.session)
        if session is None:
            return False
        membership, now = session.master.membership, (register.job, register.group, register.member)
        before = (membership.job, membership.group, session.contributor.member)
        if now != before:
            name = digest(register.session).hex()
            raise ProtocolError(f"the session with digest {name}: registered as {before}, cannot also be {now}")
        return register.epoch == session.master.epoch and register.step < session.contributor.step

    def _check_ended(self, register: Register) -> None:
        """Refuse a member that reconnects after a server restart to a run that has ended since."""
        has_ended = self._ended_groups.get((register.job, register.group), -1) >= register.epoch
        if has_ended and self._is_from_before(register):
            loss = too_late_error(register)
            self._remember_session(register.session, register.epoch, loss)
            raise loss

    def _is_from_before(self, register: Register) -> bool:
        """Whether a member registers again after the server restarted."""
        return register.server not in {NO_SERVER, self._server}

    def _check_world(self, register: Register) -> None:
        """Refuse a registration in a group that cannot open, because a member of the world has failed or is lost."""
        world, group = self.masters.get((register.job, WORLD)), self.masters.get((register.job, register.group))
        if world is None or world is group or world.epoch != register.epoch or (group and group.membership.is_open):
            return
        if lost := _failed_member(world):
            raise lost

    def _start_group(self, now: float, register: Register, peer: bytes, principal: Principal) -> list[Reply]:
        """Start a group. If its first member is refused, the group that it would replace stays."""
        name = (register.job, register.group)
        tenant = principal.tenant_of(register.job)
        if name not in self.masters:
            if principal is not ANONYMOUS:
                its_groups = sum(master.tenant == tenant for master in self.masters.values())
                self._usage.check_tenant_groups(tenant, its_groups, len(self.masters))
            self._usage.check_groups(len(self.masters))
        master = SyncMaster(self._server, register, self._usage, tenant)
        try:
            answers = master.register_slave(now, register, peer)[1]
        except StatsdBNError:
            master.memory.release_all()
            raise
        # A new world is a new run and replaces all groups of the job.
        is_new_run = name in self.masters and register.group == WORLD
        reason = f"rank {register.member} ({register.place}) began a new run of the group"
        replaced = [one for one in self.masters if one == name or (is_new_run and one[0] == register.job)]
        replies = [reply for one in replaced for reply in self._close(one, reason)]
        self.masters[name] = master
        logger.info("job %r, group %r, epoch %d begins", *name, register.epoch)
        self._add(now, master, register, peer, principal.key, was_open=False)
        return replies + answers

    def _close(self, name: GroupName, reason: str) -> list[Reply]:
        """End a group that a new group replaces."""
        error = RegistrationRefused(f"job {name[0]!r}, group {name[1]!r}: {reason}")
        master = self.masters.pop(name)
        for contributor in master.membership.contributors.values():
            self.sessions.pop(contributor.session, None)
            self._remember_session(contributor.session, master.epoch, error)
        replies = master.break_all(lambda _: error)
        master.memory.release_all()
        return replies

    def _add(
        self, now: float, master: SyncMaster, register: Register, peer: bytes, key: str, *, was_open: bool
    ) -> None:
        contributor = master.membership.contributors[register.member]
        if register.session not in self.sessions:
            contributor.since = now
            self.sessions[register.session] = Session(master, contributor, key, now, peer)
            self.has_had_members = True
            self._ended_sessions.pop(register.session, None)
        name = master.membership.name
        if self._is_from_before(register):
            logger.info("%s: %s registered again after the server restarted", name, contributor)
        if master.membership.is_open and not was_open:
            logger.info("%s is open with %d members", name, master.nr_slaves)

    def leave(self, now: float, token: bytes, cause: str) -> list[Reply]:
        """End the session of a member that leaves; `cause` is its exception, "" if there was none."""
        session = self.sessions.pop(token, None)
        if session is None:
            return []
        master, contributor = session.master, session.contributor
        logger.info("%s: %s %s", master.membership.name, contributor, _describe_leave(master, cause))
        left = f"the session with digest {digest(token).hex()} has left; register with a new one"
        return self._remove(now, master, contributor, cause, RegistrationRefused(left))

    def lose(self, now: float, token: bytes, cause: str) -> list[Reply]:
        """End the session of a lost member; `cause` is the reason."""
        session = self.sessions.pop(token, None)
        if session is None:
            return []
        master, membership, notified_at = session.master, session.master.membership, session.master.broken_notified_at
        # The loss that breaks a job is a WARNING: a launcher may stop the other processes before they can report it.
        # The server may even notice the stopped processes before it notices the failed rank, so every loss in the next
        # LAUNCHER_STOP_SECONDS is a WARNING. Later losses follow from the broken job, which the ranks have reported.
        follows = notified_at is not None and now - notified_at >= LAUNCHER_STOP_SECONDS
        breaks_job = membership.has_opened and not (membership.is_elastic or follows)
        level = logging.WARNING if breaks_job else logging.INFO
        logger.log(level, "%s: %s is lost: %s", membership.name, session.contributor, cause)
        return self._remove(now, master, session.contributor, cause)

    def dissolve(self, now: float, master: SyncMaster, error: StatsdBNError) -> list[Reply]:
        """End a group that cannot open: fail all members that wait for it, and end their sessions."""
        contributors = list(master.membership.contributors.values())
        replies = [(contributor.peer, encode_failure(error)) for contributor in contributors]
        # A member that missed the reply gets this error when it retries. It is short, because it is kept for long.
        again = RoundMismatch(f"{master.membership.name}: deadlock: its ranks waited in different places")
        for contributor in contributors:
            self.sessions.pop(contributor.session, None)
            replies += self._remove(now, master, contributor, "", again)
        return replies

    def notify(self, now: float, master: SyncMaster) -> list[Reply]:
        """Failures of a broken strict group, sent once, to members that may wait outside of its rounds.

        A member of the group may wait in a torch collective, so all are notified at their heartbeat addresses. If the
        group is the world and a member has failed or is lost, members that wait for another group of the job to open
        are notified too.
        """
        membership, lost = master.membership, master.membership.lost
        if lost is None or membership.is_elastic or master.broken_notified_at is not None:
            return []
        master.broken_notified_at = now
        peers: list[bytes] = []
        if _failed_member(master):
            groups = [one for (job, _), one in self.masters.items() if job == membership.job and one is not master]
            waiting = [one for one in groups if one.epoch == master.epoch and not one.membership.has_opened]
            peers = [one.peer for group in waiting for one in group.membership.contributors.values()]
        tokens = (contributor.session for contributor in membership.contributors.values())
        beating = dict.fromkeys(map(self.sessions.heartbeat_address, tokens))
        frame = encode_failure(lost)
        return [(peer, frame) for peer in (*peers, *filter(None, beating))]

    def _remember_session(self, token: bytes, epoch: int, error: StatsdBNError) -> None:
        self._ended_sessions[token] = error, epoch
        if len(self._ended_sessions) > REMEMBERED_SESSIONS:
            del self._ended_sessions[next(iter(self._ended_sessions))]

    def _remove(
        self, now: float, master: SyncMaster, contributor: Contributor, cause: str, error: StatsdBNError | None = None
    ) -> list[Reply]:
        """Remove a member. `error` answers its late messages; None for a lost member.

        A group ends with its last member. Members of groups that can no longer open are notified.
        """
        loss, replies = master.remove_contributor(now, contributor, cause, is_lost=error is None)
        if answer := error or loss:
            self._remember_session(contributor.session, master.epoch, answer)
        membership = master.membership
        name = (membership.job, membership.group)
        if not master.nr_slaves and self.masters.get(name) is master:
            del self.masters[name]
            master.memory.release_all()
            if membership.has_opened:
                self._ended_groups[name] = master.epoch
                if len(self._ended_groups) > REMEMBERED_GROUPS:
                    del self._ended_groups[next(iter(self._ended_groups))]
                if membership.group == WORLD:
                    self._ended_jobs.append((now, _ended_job(master)))
        return replies + self.notify(now, master)


def _is_replaced(master: SyncMaster, register: Register, *, is_new: bool) -> bool:
    """Whether a registration restarts the group: its epoch is later, or its session is new and the group is broken."""
    if register.epoch < master.epoch:
        text = (
            f"{master.membership.name}: expected epoch {master.epoch} or later, got {register.epoch} from rank "
            f"{register.member} ({register.place}); a newer run has started"
        )
        job, group = register.job, register.group
        raise StaleEpoch(text, job=job, group=group, expected=master.epoch, got=register.epoch)
    return register.epoch > master.epoch or (is_new and master.membership.state is GroupState.BROKEN)


def _failed_member(world: SyncMaster) -> StatsdBNError | None:
    """Error of the member whose failure or loss broke the world; None without such a member, or for another group."""
    membership = world.membership
    has_failed = membership.group == WORLD and membership.lost and membership.lost.fields.get("cause")
    return membership.lost if has_failed else None


def _ended_job(master: SyncMaster) -> dict[str, Any]:
    """Entry of the report for an ended job."""
    membership = master.membership
    lost, by = membership.lost, membership.lost_by
    # After an orderly end, in which members leave one by one, no error is reported.
    is_orderly = lost is None or (lost.fields.get("cause") == "" and not (master.failed or master.was_refused))
    return {
        "job": membership.job,
        "epoch": master.epoch,
        "world_size": membership.world_size,
        "rounds_done": master.rounds_done,
        "lost": "" if is_orderly else log_line(lost or "")[: limits.MAX_NAME_BYTES],
        **({"lost_by": by} if by and not is_orderly else {}),
    }


def _describe_leave(master: SyncMaster, cause: str) -> str:
    """Log text of a leaving member. All members may leave with the same cause, which is logged once."""
    if not cause:
        return "leaves"
    if cause == master.logged_cause:
        return f"leaves after the same {log_line(cause.partition(':')[0])}"
    master.logged_cause = cause
    return f"leaves: {log_line(cause)}"
