"""Registry: all groups of all jobs, and the sessions that are registered.

A session is registered in one group. A group is forgotten when its last session ends; `Ended` remembers what its
members may still have to be told, so that a late message does not begin them again, and `EndedJobs` what became of the
latest jobs, for people. What they remember is bounded; what ended longest ago is forgotten first.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from server.core.liveness import Liveness
from server.group.contributor import Contributor
from server.group.master import SyncMaster
from server.group.rounds import Reply, failure
from server.security.access import ANYBODY, Tenant
from statsd_bn import limits
from statsd_bn.error_text import in_log
from statsd_bn.errors import RegistrationRefused, RoundMismatch, StatsdBNError
from statsd_bn.messages import WORLD
from statsd_bn.text import on_one_line
from statsd_bn.tokens import digest

# All members of a large job may end at once.
REMEMBERED_SESSIONS = 32_768

# For each group its name and an epoch.
REMEMBERED_GROUPS = 4096

Name = tuple[str, str]
"""Of a group: its job, and its name there."""


@dataclass(frozen=True, slots=True)
class _Reason:
    """What an ended session is told, and the epoch it ended in; it may register again in a later one."""

    error: StatsdBNError
    epoch: int


class Ended:
    """The sessions and groups that have ended."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, _Reason] = {}
        self._groups: dict[Name, int] = {}

    def end_session(self, session: bytes, epoch: int, error: StatsdBNError) -> None:
        """Remember that a session has ended, and the error that it is told from now on."""
        self._sessions[session] = _Reason(error, epoch)
        if len(self._sessions) > REMEMBERED_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def begin_session(self, session: bytes) -> None:
        """Forget that a session has ended: it is registered, perhaps again."""
        self._sessions.pop(session, None)

    def why(self, session: bytes, epoch: int | None = None) -> StatsdBNError | None:
        """Error that tells a session why it has ended; None if it has not, or ended before this epoch."""
        reason = self._sessions.get(session)
        return reason.error if reason and (epoch is None or epoch <= reason.epoch) else None

    def end_group(self, name: Name, epoch: int) -> None:
        """Remember that all members of an open group have left."""
        self._groups[name] = epoch
        if len(self._groups) > REMEMBERED_GROUPS:
            del self._groups[next(iter(self._groups))]

    def has_ended(self, name: Name, epoch: int) -> bool:
        """Whether a group has ended in this epoch or in a later one."""
        return self._groups.get(name, -1) >= epoch


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


logger = logging.getLogger("statsd_bn.server")

# How soon others end after a job broke because a launcher ends them; a process that ends itself waits longer.
OTHERS_END_SECONDS = 5.0


@dataclass(slots=True)
class SessionRecord:
    """What the server knows of a registered session: its group, the member that it is there, and its key."""

    master: SyncMaster
    contributor: Contributor
    key: str = ANYBODY.key


class Registry:
    """Groups and registered sessions.

    Args:
        started: the time it began, on the clock of all other times.
        silence_seconds: how long a member may be silent.

    Attributes:
        masters: of the groups, by job and group.
        sessions: those that are registered.
        ended: the sessions and groups that have ended.
        ended_jobs: the latest jobs that have ended, for people.
        liveness: when each session was heard.
        has_had_members: whether any session is registered, or was.
    """

    def __init__(self, started: float, silence_seconds: float) -> None:
        self.masters: dict[Name, SyncMaster] = {}
        self.sessions: dict[bytes, SessionRecord] = {}
        self.ended = Ended()
        self.ended_jobs = EndedJobs()
        self.liveness = Liveness(started, silence_seconds)
        self.has_had_members = False

    def add(self, session: bytes, record: SessionRecord) -> None:
        """Register a session."""
        self.sessions[session] = record
        self.has_had_members = True
        self.ended.begin_session(session)

    def leave(self, now: float, session: bytes, cause: str) -> list[Reply]:
        """End the session of a member that leaves; `cause` says how it failed, "" if it did not."""
        record = self._remove(session)
        if record is None:
            return []
        _log_end(record, _how_it_leaves(record.master, cause))
        return self._take_out(now, session, record, cause)

    def lose(self, now: float, session: bytes, cause: str) -> list[Reply]:
        """End the session of a member that is lost; `cause` says how."""
        record = self._remove(session)
        if record is None:
            return []
        membership = record.master.membership
        # What breaks a job is worth a line in any log: a launcher may end the others before they can say it. It ends
        # them so soon that they may be found first, so each one that is lost then gets the line. Later ones end by
        # themselves, because it is broken, and have said so.
        told_at = record.master.news_told_at
        follows = told_at is not None and now - told_at >= OTHERS_END_SECONDS
        breaks_job = membership.has_opened and not (membership.is_elastic or follows)
        _log_end(record, f"is lost: {cause}", logging.WARNING if breaks_job else logging.INFO)
        loss, replies = record.master.lose_contributor(now, record.contributor, cause)
        if loss:
            self.ended.end_session(session, record.master.epoch, loss)
        return self._end_if_empty(now, record.master, replies)

    def dissolve(self, now: float, master: SyncMaster, error: RoundMismatch) -> list[Reply]:
        """Tell all who wait for a group to open that it will not, and end their sessions so that each is told once."""
        membership = master.membership
        contributors = list(membership.contributors.values())
        replies = [(contributor.peer, failure(error)) for contributor in contributors]
        # One whose connection broke meanwhile asks again. What it is told then is short, because it is kept for long.
        again = RoundMismatch(
            f"job {membership.job!r}, group {membership.group!r}: it has ended, because its members waited for one "
            "another in different places"
        )
        for contributor in contributors:
            self._remove(contributor.session)
            replies += self._take_out(now, contributor.session, SessionRecord(master, contributor), "")
            self.ended.end_session(contributor.session, master.epoch, again)
        return replies

    def close(self, name: Name, reason: str) -> list[Reply]:
        """End a group that a new one replaces."""
        error = RegistrationRefused(f"job {name[0]!r}, group {name[1]!r}: {reason}")
        master = self.masters.pop(name)
        for session in [contributor.session for contributor in master.membership.contributors.values()]:
            record = self.sessions.get(session)
            if record and record.master is master:
                self._remove(session)
                self.ended.end_session(session, master.epoch, error)
        replies = master.break_all(lambda _: error)
        master.retire()
        return replies

    def tell_of_loss(self, world: SyncMaster) -> list[Reply]:
        """Tell those who wait for a group of the job to open that the world has lost a member; once for each world.

        The member that they wait for may be the lost one.
        """
        job, lost = world.membership.job, failed_member(world)
        if lost is None or world.loss_is_told:
            return []
        world.loss_is_told = True
        groups = [master for name, master in self.masters.items() if name[0] == job and master.epoch == world.epoch]
        return [
            (contributor.peer, failure(lost))
            for master in groups
            if master is not world and not master.membership.has_opened
            for contributor in master.membership.contributors.values()
        ]

    def tell_news(self, now: float, master: SyncMaster) -> list[Reply]:
        """Tell the members of a strict group that it is broken, where their heartbeats come from; once for each group.

        A member hears it there at once, whatever its training script is doing. One that waits in a collective of torch
        would not come to a round again.
        """
        membership = master.membership
        if membership.lost is None or membership.is_elastic or master.news_told_at is not None:
            return []
        master.news_told_at = now
        addresses = (self.liveness.beacon(contributor.session) for contributor in membership.contributors.values())
        frame = failure(membership.lost)
        return [(address, frame) for address in dict.fromkeys(addresses) if address]

    def _remove(self, session: bytes) -> SessionRecord | None:
        self.liveness.forget(session)
        return self.sessions.pop(session, None)

    def _take_out(self, now: float, session: bytes, record: SessionRecord, cause: str) -> list[Reply]:
        """Take a member that leaves out of its group, and remember its session as ended."""
        _, replies = record.master.remove_contributor(now, record.contributor, cause)
        name = digest(session).hex()
        left = RegistrationRefused(f"the session with digest {name}: expected a new one, this one has left")
        self.ended.end_session(session, record.master.epoch, left)
        return self._end_if_empty(now, record.master, replies)

    def _end_if_empty(self, now: float, master: SyncMaster, replies: list[Reply]) -> list[Reply]:
        """Forget a group without members; then tell those who wait for a group of the job that can never open."""
        membership = master.membership
        name = (membership.job, membership.group)
        if not master.nr_slaves and self.masters.get(name) is master:
            del self.masters[name]
            master.retire()
            if membership.has_opened:
                self.ended.end_group(name, master.epoch)
                self.ended_jobs.add(now, master)
        return replies + self.tell_of_loss(master) + self.tell_news(now, master)


def failed_member(world: SyncMaster) -> StatsdBNError | None:
    """Error of the member whose failure broke the job's world group; None if none failed, or for any other group."""
    membership = world.membership
    has_failed = membership.group == WORLD and membership.lost and membership.lost.fields.get("cause")
    return membership.lost if has_failed else None


def _how_it_leaves(master: SyncMaster, cause: str) -> str:
    """What concerns all members they all give as their reason, and the log has it once."""
    if not cause:
        return "leaves"
    if cause == master.logged_cause:
        return f"leaves after this {on_one_line(cause.partition(':')[0])}"
    master.logged_cause = cause
    return f"leaves: {on_one_line(cause)}"


def _log_end(record: SessionRecord, how: str, level: int = logging.INFO) -> None:
    membership = record.master.membership
    logger.log(level, "job %r, group %r: %s %s", membership.job, membership.group, record.contributor, how)
