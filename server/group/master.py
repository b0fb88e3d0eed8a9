"""SyncMaster: collects and reduces the contributions of one group.

Pure: messages, peers and times go in, replies come out. Without a socket, thread or clock, a test can play years of
faults in seconds.
"""

import math

from server.group.contributor import Contributor
from server.group.health import GroupHealth
from server.group.lifecycle import GroupState, MemberState, Notice
from server.group.membership import Membership
from server.group.open_rounds import OpenRounds
from server.group.recovery import RecoveredResult
from server.group.rounds import Reply, failure_frame, reduce_round
from server.security.quota import EXPECTED_BYTES, GROUP_BYTES, MEMBER_BYTES, MemoryShare, QuotaUsage
from statsd_bn.errors import MasterStopped, ReplicaLost, StatsdBNError
from statsd_bn.messages import Aggregate, Contribution, Heartbeat, NonFiniteRound, Register, Registered, digest
from statsd_bn.round_key import RoundKey
from statsd_bn.text import error_text
from statsd_bn.wire import encode


class SyncMaster:
    """One epoch of one group: its members, open rounds and latest results.

    Args:
        server: random id of this server process.
        register: the registration that starts the group; it sets job, group, epoch and policy.
        usage: the server's memory accounting.
        tenant: account for the group's memory; default: the job.

    Raises:
        LimitExceeded: no memory is left for another group.
    """

    # The seed's name for reducing a round; `OpenRounds` calls the function itself.
    run_master = staticmethod(reduce_round)

    def __init__(self, server: bytes, register: Register, usage: QuotaUsage | None = None, tenant: str = "") -> None:
        self.epoch = register.epoch
        self.logged_cause = ""  # of the latest logged leave
        self.deadlock_at = -math.inf  # when the latest deadlock of its job was reported; only of a world group
        self.broken_notified_at: float | None = None  # when members without a round were notified
        self.why_not_faster = ""
        self._rounds_without_server = 0
        self._last_progress = -math.inf
        self._server = server
        usage = usage or QuotaUsage()
        self.membership = Membership(register, usage.quota.silence_seconds)
        self.tenant = tenant or f"job {register.job!r}"
        self.memory = MemoryShare(usage, self.tenant)
        self.memory.allocate(GROUP_BYTES)
        self._accounted = 0
        self.health = GroupHealth(self.membership, self.memory)
        self.open_rounds = OpenRounds(self.epoch, self.membership, usage, self.memory, self.health)

    @property
    def rounds_done(self) -> int:
        """Number of successful rounds, including those in shared memory."""
        return self.open_rounds.done + self._rounds_without_server

    @property
    def last_active(self) -> float:
        """Time of the last ended round, or of the last reported progress in shared memory."""
        return max(self.open_rounds.last_answered, self._last_progress)

    @property
    def nr_slaves(self) -> int:
        """Number of registered members."""
        return len(self.membership.contributors)

    def register_slave(self, now: float, register: Register, peer: bytes) -> tuple[Contributor, list[Reply]]:
        """Register a member. The reply names the missing members; once all are registered, each member gets one.

        Raises:
            RegistrationRefused: the reason of a refusal.
            ReplicaLost: the group is broken, or the member was considered lost.
            LimitExceeded: no memory is left for another member.
        """
        # A registered member may repeat its registration even without free memory.
        if more := self._size_for(register):
            self.memory.check(more)
        contributor = self.membership.admit(now, register, peer)
        self._update_memory()
        takes_part = contributor.state is MemberState.TAKES_PART
        replies = [] if takes_part else self.open_rounds.withdraw(contributor)
        replies += self._advance(now) or [(peer, self._registered(contributor))]
        return contributor, replies + self.open_rounds.complete()

    def contribute(self, now: float, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Add a member's rows to a round; the last ones end it. An ended round is answered again."""
        try:
            return self.open_rounds.contribute(now, contributor, contribution, peer)
        except StatsdBNError as error:
            return [(peer, failure_frame(error, contribution.key))]

    def record_heartbeat(self, now: float, contributor: Contributor, heartbeat: Heartbeat) -> None:
        """Record the state that a member reports in a heartbeat."""
        if heartbeat.rounds > self._rounds_without_server or heartbeat.step != contributor.reported_step:
            self._last_progress = now
        contributor.reported_step, contributor.transport = heartbeat.step, heartbeat.transport
        self.membership.record_reported_step(heartbeat.step)
        self.why_not_faster = heartbeat.why
        # Members report the same rounds, so the maximum counts.
        self._rounds_without_server = max(self._rounds_without_server, heartbeat.rounds)
        contributor.waited = heartbeat.waited / 1e3

    def record_non_finite(self, contributor: Contributor, report: NonFiniteRound) -> None:
        """Record the origin of a NaN or infinity in a round in shared memory."""
        self.open_rounds.check_key(contributor, report.key)
        self.health.non_finite.record_round(report.key, report.members, report.what, self.membership.contributors)

    def finish_round(self, now: float, contributor: Contributor, key: RoundKey) -> None:
        """Drop a round that the members finished in shared memory; elastic groups have no such rounds."""
        self.open_rounds.check_key(contributor, key)
        if not self.membership.is_elastic:
            self.open_rounds.discard(now, key)

    def record_result(self, now: float, contributor: Contributor, aggregate: Aggregate, peer: bytes) -> list[Reply]:
        """Record an aggregate that the member received before a server restart, see `server.group.recovery`."""
        key = aggregate.key
        try:
            self.open_rounds.check_key(contributor, key)
        except StatsdBNError as error:
            return [(peer, failure_frame(error, key))]
        membership = self.membership
        if not (membership.recovery and (contributor.results_pending or key in contributor.recovered)):
            return []  # the group has recovered, or the member announced fewer results
        if key not in membership.recovered.results:
            self.memory.check(RecoveredResult(aggregate, contributor).size)
        membership.record_result(contributor, aggregate)
        self._update_memory()
        # Only the last announced result of a member can complete the recovery, and 1,000 members send thousands.
        return [] if contributor.results_pending else self._advance(now)

    def remove_contributor(
        self, now: float, contributor: Contributor, cause: str, *, is_lost: bool = False
    ) -> tuple[ReplicaLost | None, list[Reply]]:
        """Remove a member that leaves or is lost; returns the error for its late messages, and replies to the others.

        `cause` is the exception with which it leaves, "" if there was none, or the reason to consider it lost.
        """
        loss = self.membership.remove(contributor, cause, is_lost=is_lost)
        self.open_rounds.parked.drop_member(contributor.member)
        self.health.pace.remove(contributor.member)
        self._update_memory()
        replies = self._send_notices()
        if self.membership.state is not GroupState.BROKEN:
            replies += self.open_rounds.withdraw(contributor) + self._advance(now)
        return loss, replies

    def expire(self, now: float) -> list[Reply]:
        """End rounds, and the recovery after a server restart, at their deadlines."""
        self.membership.expire(now)
        self._update_memory()
        self.health.update_pace(now, self.rounds_done)
        return self._send_notices() + self._advance(now) + self.open_rounds.expire(now)

    def stop(self) -> list[Reply]:
        """End all open rounds, and the wait for the group to open: the server stops and has no successor."""
        why = "the server stopped because the process that started it ended"
        replies = self.open_rounds.break_all(lambda key: MasterStopped(error_text(why, where=str(key))))
        if self.membership.state not in {GroupState.FILLING, GroupState.RECOVERING}:
            return replies
        text = error_text("the server stopped before the group was complete", where=self.membership.name)
        stopped = failure_frame(MasterStopped(text))
        return replies + [(contributor.peer, stopped) for contributor in self.membership.contributors.values()]

    def pause_rejoining(self, error: StatsdBNError) -> list[Reply]:
        """Fail the wait of rejoining members for the others; they are paused again."""
        returning = self.membership.rejoining
        for contributor in returning:
            self.membership.pause(contributor)
        return [(contributor.peer, failure_frame(error)) for contributor in returning]

    def _size_for(self, register: Register) -> int:
        """Maximum number of bytes that a registration adds."""
        member = 0 if register.member in self.membership.contributors else MEMBER_BYTES
        is_recovery = register.was_in_group and not self.membership.has_opened
        return member + (EXPECTED_BYTES * len(register.known) if is_recovery else 0)

    def _update_memory(self) -> None:
        """Update the memory accounted for members, and during a recovery for their reports."""
        size = MEMBER_BYTES * self.nr_slaves + self.health.comparison.size + self.membership.recovered.size
        if recovery := self.membership.recovery:
            size += EXPECTED_BYTES * len(recovery.expected)
        self.memory.adjust(size - self._accounted)
        self._accounted = size

    def _advance(self, now: float) -> list[Reply]:
        """Open the group or start a pass if no member is missing; returns the replies."""
        if not self.membership.advance(now):
            return []
        self.open_rounds.last_answered = now
        replies = [(one.peer, self._registered(one)) for one in self.membership.contributors.values()]
        recovered = self.membership.recovered
        if contradiction := recovered.contradiction():
            self.membership.break_for(contradiction)
            return replies + self._send_notices()
        # Parked rows come before recovered results: a complete round needs no trust in a member.
        for contributor, contribution, peer in self.open_rounds.parked.consume():
            replies += self.contribute(now, contributor, contribution, peer)
        recovered.enabled = True
        return replies + (self.open_rounds.complete() if recovered.results else [])

    def _send_notices(self) -> list[Reply]:
        """Replies for the pending notices of the membership."""
        notices, self.membership.notices = self.membership.notices, []
        return [reply for notice, error in notices for reply in self._notify(notice, error)]

    def _notify(self, notice: Notice, error: StatsdBNError) -> list[Reply]:
        is_broken, has_opened = notice is Notice.BROKEN, self.membership.has_opened
        with_a_round = self.open_rounds.parked.members
        # These wait for the group to open or to rejoin, and have no round that could carry the error.
        waiting = [
            one.peer
            for one in self.membership.contributors.values()
            if one.state is MemberState.REJOINING or (is_broken and not (has_opened or one.member in with_a_round))
        ]
        replies = self.open_rounds.break_all(lambda _: error) if is_broken else []
        frame = failure_frame(error)
        return replies + [(peer, frame) for peer in waiting]

    def _registered(self, contributor: Contributor) -> bytes:
        missing, present = self.membership.missing_for(contributor)
        return encode(
            Registered(digest(contributor.session), self._server, self.epoch, contributor.first_step, missing, present)
        )
