"""Registry: all groups of all jobs, and their registered sessions.

A session is registered in one group. A group is removed with its last session. `Tombstones` keeps the errors for ended
sessions and groups, so that a late message does not start them again. `EndedJobs` keeps the latest jobs for the status
report. Both are bounded and evict the oldest entries.
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from server.core.liveness import Liveness
from server.group.contributor import Contributor
from server.group.master import SyncMaster
from server.group.rounds import Reply, failure_frame
from server.security.access import ANONYMOUS, Principal
from statsd_bn import limits
from statsd_bn.errors import RegistrationRefused, RoundMismatch, StatsdBNError
from statsd_bn.messages import WORLD, digest
from statsd_bn.text import log_line

# The members of a large job may end at the same time.
REMEMBERED_SESSIONS = 32_768

# An entry is a name and an epoch.
REMEMBERED_GROUPS = 4096

GroupName = tuple[str, str]
"""Job and name of a group."""


class Tombstones:
    """Sessions and groups that have ended."""

    def __init__(self) -> None:
        # An ended session gets its error from now on, but it may register again in a later epoch.
        self.sessions: dict[bytes, tuple[StatsdBNError, int]] = {}
        self.groups: dict[GroupName, int] = {}  # the epochs of groups that all members have left

    def add_session(self, session: bytes, epoch: int, error: StatsdBNError) -> None:
        """Add an ended session, with the error that it gets from now on."""
        self.sessions[session] = error, epoch
        if len(self.sessions) > REMEMBERED_SESSIONS:
            del self.sessions[next(iter(self.sessions))]

    def error_for(self, session: bytes, epoch: int = 0) -> StatsdBNError | None:
        """Error of an ended session; None if it has not ended, or ended before this epoch."""
        error, last = self.sessions.get(session, (None, epoch))
        return error if epoch <= last else None

    def add_group(self, name: GroupName, epoch: int) -> None:
        """Add a group that all members have left."""
        self.groups[name] = epoch
        if len(self.groups) > REMEMBERED_GROUPS:
            del self.groups[next(iter(self.groups))]


# Jobs kept for the report, and for how long.
REMEMBERED_JOBS = 32
REMEMBERED_SECONDS = 600.0


class EndedJobs:
    """The latest ended jobs: all members have left or are lost."""

    def __init__(self) -> None:
        # The time of the end, and the entry of the report.
        self._jobs: deque[tuple[float, dict[str, Any]]] = deque(maxlen=REMEMBERED_JOBS)

    def add(self, now: float, master: SyncMaster) -> None:
        """Add an ended group if it is the world group of its job."""
        membership = master.membership
        if membership.group != WORLD:
            return
        entry = {
            "job": membership.job,
            "epoch": master.epoch,
            "world_size": membership.world_size,
            "rounds_done": master.rounds_done,
            "lost": (lost := _describe_break(master)),
            **({"lost_by": membership.lost_by} if lost and membership.lost_by else {}),
        }
        self._jobs.append((now, entry))

    def report(self, now: float, principal: Principal) -> list[dict[str, Any]]:
        """Report entries of the jobs that a key may see, latest first."""
        return [
            {**entry, "seconds": now - ended}
            for ended, entry in reversed(self._jobs)
            if now - ended < REMEMBERED_SECONDS and principal.may_access(entry["job"])
        ]


def _describe_break(master: SyncMaster) -> str:
    """Reason of a broken job; "" after an orderly end, in which members leave one by one."""
    lost = master.membership.lost
    rounds = master.open_rounds
    if lost is None or (lost.fields.get("cause") == "" and not (rounds.failed or rounds.was_refused)):
        return ""
    return log_line(lost)[: limits.MAX_NAME_BYTES]


logger = logging.getLogger("statsd_bn.server")

# A launcher stops the other processes of a broken job within this time; an exit without a launcher takes longer.
LAUNCHER_STOP_SECONDS = 5.0


@dataclass(slots=True)
class SessionRecord:
    """A registered session: its group, its member there, and its public key."""

    master: SyncMaster
    contributor: Contributor
    key: str = ANONYMOUS.key


class Registry:
    """Groups and registered sessions."""

    def __init__(self, started: float, silence_seconds: float) -> None:
        self.masters: dict[GroupName, SyncMaster] = {}
        self.sessions: dict[bytes, SessionRecord] = {}
        self.tombstones = Tombstones()
        self.ended_jobs = EndedJobs()
        self.liveness = Liveness(started, silence_seconds)
        self.has_had_members = False

    def add(self, session: bytes, record: SessionRecord) -> None:
        """Register a session."""
        self.sessions[session] = record
        self.has_had_members = True
        self.tombstones.sessions.pop(session, None)

    def leave(self, now: float, session: bytes, cause: str) -> list[Reply]:
        """End the session of a member that leaves; `cause` is its exception, "" if there was none."""
        record = self._unregister(session)
        if record is None:
            return []
        logger.info(
            "%s: %s %s", record.master.membership.name, record.contributor, _describe_leave(record.master, cause)
        )
        return self._remove_member(now, record, cause)

    def lose(self, now: float, session: bytes, cause: str) -> list[Reply]:
        """End the session of a lost member; `cause` is the reason."""
        record = self._unregister(session)
        if record is None:
            return []
        membership, notified_at = record.master.membership, record.master.broken_notified_at
        # The loss that breaks a job is a WARNING: a launcher may stop the other processes before they can report it.
        # The server may even notice the stopped ones before the rank that failed, so every loss within
        # LAUNCHER_STOP_SECONDS is a WARNING. Later ones follow from the broken job, and the ranks have reported it.
        follows = notified_at is not None and now - notified_at >= LAUNCHER_STOP_SECONDS
        breaks_job = membership.has_opened and not (membership.is_elastic or follows)
        level = logging.WARNING if breaks_job else logging.INFO
        logger.log(level, "%s: %s is lost: %s", membership.name, record.contributor, cause)
        loss, replies = record.master.lose_contributor(now, record.contributor, cause)
        if loss:
            self.tombstones.add_session(session, record.master.epoch, loss)
        return self._end_if_empty(now, record.master, replies)

    def dissolve(self, now: float, master: SyncMaster, error: RoundMismatch) -> list[Reply]:
        """End a group that cannot open: fail all members that wait for it, and end their sessions."""
        contributors = list(master.membership.contributors.values())
        replies = [(contributor.peer, failure_frame(error)) for contributor in contributors]
        # A member that missed the reply gets this one when it retries; short, since tombstones keep it for long.
        again = RoundMismatch(f"{master.membership.name}: deadlock: its ranks waited in different places")
        for contributor in contributors:
            self._unregister(contributor.session)
            replies += self._remove_member(now, SessionRecord(master, contributor), "")
            self.tombstones.add_session(contributor.session, master.epoch, again)
        return replies

    def close(self, name: GroupName, reason: str) -> list[Reply]:
        """End a group that a new group replaces."""
        error = RegistrationRefused(f"job {name[0]!r}, group {name[1]!r}: {reason}")
        master = self.masters.pop(name)
        for contributor in master.membership.contributors.values():
            record = self.sessions.get(contributor.session)
            if record and record.master is master:
                self._unregister(contributor.session)
                self.tombstones.add_session(contributor.session, master.epoch, error)
        replies = master.break_all(lambda _: error)
        master.release()
        return replies

    def notify_waiting(self, world: SyncMaster) -> list[Reply]:
        """Fail members that wait for a group of the job to open after the world lost a member; once for each world."""
        lost = failed_member(world)
        if lost is None or world.loss_notified:
            return []
        world.loss_notified = True
        groups = [one for (job, _), one in self.masters.items() if job == world.membership.job and one is not world]
        waiting = [one for one in groups if one.epoch == world.epoch and not one.membership.has_opened]
        return [
            (one.peer, failure_frame(lost)) for master in waiting for one in master.membership.contributors.values()
        ]

    def notify_broken(self, now: float, master: SyncMaster) -> list[Reply]:
        """Notify the members of a broken strict group at their heartbeat addresses; once for each group.

        A member that waits in a torch collective would not contribute to another round.
        """
        membership = master.membership
        if membership.lost is None or membership.is_elastic or master.broken_notified_at is not None:
            return []
        master.broken_notified_at = now
        addresses = (self.liveness.heartbeat_address(one.session) for one in membership.contributors.values())
        frame = failure_frame(membership.lost)
        return [(address, frame) for address in dict.fromkeys(addresses) if address]

    def _unregister(self, session: bytes) -> SessionRecord | None:
        self.liveness.remove(session)
        return self.sessions.pop(session, None)

    def _remove_member(self, now: float, record: SessionRecord, cause: str) -> list[Reply]:
        """Remove a leaving member from its group and add its session to the tombstones."""
        session = record.contributor.session
        _, replies = record.master.remove_contributor(now, record.contributor, cause)
        name = digest(session).hex()
        left = RegistrationRefused(f"the session with digest {name} has left; register with a new one")
        self.tombstones.add_session(session, record.master.epoch, left)
        return self._end_if_empty(now, record.master, replies)

    def _end_if_empty(self, now: float, master: SyncMaster, replies: list[Reply]) -> list[Reply]:
        """Remove a group without members, then notify the members of groups that can no longer open."""
        membership = master.membership
        name = (membership.job, membership.group)
        if not master.nr_slaves and self.masters.get(name) is master:
            del self.masters[name]
            master.release()
            if membership.has_opened:
                self.tombstones.add_group(name, master.epoch)
                self.ended_jobs.add(now, master)
        return replies + self.notify_waiting(master) + self.notify_broken(now, master)


def failed_member(world: SyncMaster) -> StatsdBNError | None:
    """Error of the member that broke the world group by its failure; None without one, or for another group."""
    membership = world.membership
    has_failed = membership.group == WORLD and membership.lost and membership.lost.fields.get("cause")
    return membership.lost if has_failed else None


def _describe_leave(master: SyncMaster, cause: str) -> str:
    """Log text of a leaving member. All members may leave with the same cause, which is logged once."""
    if not cause:
        return "leaves"
    if cause == master.logged_cause:
        return f"leaves after the same {log_line(cause.partition(':')[0])}"
    master.logged_cause = cause
    return f"leaves: {log_line(cause)}"
