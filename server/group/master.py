"""SyncMaster: collects and reduces the contributions of one group.

Pure: messages, peers and times go in, replies come out. Without a socket, thread or clock, a test can play years of
faults in seconds.
"""

import logging
import math
from collections.abc import Callable

from server.group.contributor import Contributor
from server.group.health import GroupHealth
from server.group.lifecycle import GroupState, MemberState, Notice
from server.group.membership import Membership
from server.group.open_rounds import OpenRounds, ParkedContributions, pending_frame
from server.group.results import Archive, RecoveredResults, reduce_round
from server.group.rounds import Reply, Round, conflict_error, failure_frame, unknown_session
from server.security.quota import EXPECTED_BYTES, GROUP_BYTES, MEMBER_BYTES, RUN_BYTES, MemoryShare, QuotaUsage
from statsd_bn.errors import MasterStopped, ReplicaLost, StatsdBNError
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import Aggregate, Contribution, Heartbeat, NonFiniteRound, Register, Registered, digest
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey
from statsd_bn.text import error_text
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.server")

# Read for each contribution; attribute access on an enum is slow in Python 3.11.
_RECOVERING = GroupState.RECOVERING


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
        self.loss_notified = False  # members that wait in other groups were notified of a loss in this one
        self.broken_notified_at: float | None = None  # when its members were notified at their heartbeat addresses
        self.why_not_faster = ""
        self._rounds_without_server = 0
        self._last_progress = -math.inf
        self._server = server
        usage = usage or QuotaUsage()
        self.membership = Membership(register, usage.quota.silence_seconds)
        self.tenant = tenant or f"job {register.job!r}"
        self._memory = MemoryShare(usage, self.tenant)
        self._memory.allocate(GROUP_BYTES)
        self._accounted = self._recovered_bytes = 0
        self._archive = Archive(self._memory)
        self._recovered = RecoveredResults(self._memory)
        self.open_rounds = OpenRounds(self.epoch, self.membership, usage, self._archive, self._recovered)
        self._parked = ParkedContributions(self._memory)
        self.health = GroupHealth(self.membership, self.open_rounds, self._memory)

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
            self._memory.check(more)
        contributor = self.membership.admit(now, register, peer)
        self._update_memory()
        takes_part = contributor.state is MemberState.TAKES_PART
        replies = [] if takes_part else self.open_rounds.withdraw(contributor)
        replies += self._advance(now) or [(peer, self._registered(contributor))]
        return contributor, replies + self.open_rounds.complete() + self._send_notices()

    def contribute(self, now: float, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Add a member's rows to a round; the last ones end it. An ended round is answered again, from the archive."""
        try:
            if ended := self._archive.get(contribution.key):
                return self._answer_again(ended, contributor, contribution.rows, peer)
            if self.membership.state is _RECOVERING:
                return self._park(contributor, contribution, peer)
            replies = self.open_rounds.contribute(now, contributor, contribution, peer)
        except StatsdBNError as error:
            return [(peer, failure_frame(error, contribution.key))]
        return replies + self._send_notices() if self.membership.notices else replies

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
        self.open_rounds.non_finite.record_round(report.key, report.members, report.what, self.membership.contributors)

    def finish_round(self, now: float, contributor: Contributor, key: RoundKey) -> None:
        """Drop a round that the members finished in shared memory; elastic groups have no such rounds."""
        self.open_rounds.check_key(contributor, key)
        if self.membership.is_elastic:
            return
        self.open_rounds.discard(now, key)
        self._parked.drop_round(key)

    def record_result(self, now: float, contributor: Contributor, aggregate: Aggregate, peer: bytes) -> list[Reply]:
        """Record an aggregate that the member received before a server restart, see `server.group.results`."""
        key = aggregate.key
        try:
            self.open_rounds.check_key(contributor, key)
        except StatsdBNError as error:
            return [(peer, failure_frame(error, key))]
        membership = self.membership
        if not (membership.recovery and (contributor.results_pending or key in contributor.recovered)):
            return []  # the group has recovered, or the member announced fewer results
        size = 0 if key in contributor.recovered else RUN_BYTES * len(aggregate.members.runs)
        self._memory.check(size)
        self._recovered_bytes += size
        self._update_memory()
        contributor.recovered.add(key)
        membership.record_result(key.step, aggregate.members)
        self._recovered.add(contributor, aggregate)
        # Only the last announced result of a member can complete the recovery, and 1,000 members send thousands.
        return [] if contributor.results_pending else self._advance(now)

    def remove_contributor(
        self, now: float, contributor: Contributor, cause: str
    ) -> tuple[ReplicaLost | None, list[Reply]]:
        """Remove a member that leaves; returns the error for its late messages, and the replies to the others."""
        return self._after_removal(now, contributor, self.membership.remove(contributor, cause))

    def lose_contributor(
        self, now: float, contributor: Contributor, cause: str
    ) -> tuple[ReplicaLost | None, list[Reply]]:
        """Remove a lost member; otherwise like `remove_contributor`."""
        return self._after_removal(now, contributor, self.membership.lose(contributor, cause))

    def expire(self, now: float) -> list[Reply]:
        """End rounds, and the recovery after a server restart, at their deadlines."""
        self.membership.expire(now)
        self._update_memory()
        self.health.update_pace(now, self.rounds_done)
        return self._send_notices() + self._advance(now) + self.open_rounds.expire(now)

    def stop(self) -> list[Reply]:
        """End all open rounds, and the wait for the group to open: the server stops and has no successor."""
        why = "the server stopped because the process that started it ended"
        replies = self.break_all(lambda key: MasterStopped(error_text(why, where=str(key))))
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

    def break_all(self, reason: Callable[[RoundKey], StatsdBNError]) -> list[Reply]:
        """Fail all open rounds and parked contributions, each with its own error."""
        parked = [(peer, contribution.key) for _, contribution, peer in self._parked.consume()]
        return self.open_rounds.break_all(reason) + [(peer, failure_frame(reason(key), key)) for peer, key in parked]

    def release(self) -> None:
        """Release all memory of the group after its end."""
        self._memory.release_all()

    def _size_for(self, register: Register) -> int:
        """Maximum number of bytes that a registration adds."""
        member = 0 if register.member in self.membership.contributors else MEMBER_BYTES
        is_recovery = register.was_in_group and not self.membership.has_opened
        return member + (EXPECTED_BYTES * len(register.known) if is_recovery else 0)

    def _update_memory(self) -> None:
        """Update the memory accounted for members, and during a recovery for their reports."""
        size = MEMBER_BYTES * self.nr_slaves + self.health.comparison.size
        if (recovery := self.membership.recovery) is not None:
            size += EXPECTED_BYTES * len(recovery.expected) + self._recovered_bytes
        self._memory.adjust(size - self._accounted)
        self._accounted = size

    @property
    def allocated(self) -> int:
        """Bytes allocated for the group."""
        return self._memory.allocated

    def _advance(self, now: float) -> list[Reply]:
        """Open the group or start a pass if no member is missing; returns the replies."""
        if not self.membership.advance(now):
            return []
        self.open_rounds.last_answered = now
        replies = [(one.peer, self._registered(one)) for one in self.membership.contributors.values()]
        if contradiction := self._recovered.contradiction():
            self.membership.break_for(contradiction)
            return replies + self._send_notices()
        # Parked rows come before recovered results: a complete round needs no trust in a member.
        for contributor, contribution, peer in self._parked.consume():
            replies += self.contribute(now, contributor, contribution, peer)
        self._recovered.enabled = True
        return replies + (self.open_rounds.complete() + self._send_notices() if self._recovered.results else [])

    def _after_removal(
        self, now: float, contributor: Contributor, loss: ReplicaLost | None
    ) -> tuple[ReplicaLost | None, list[Reply]]:
        self._parked.drop_member(contributor.member)
        self.health.pace.remove(contributor.member)
        self._update_memory()
        replies = self._send_notices()
        if self.membership.state is not GroupState.BROKEN:
            replies += self.open_rounds.withdraw(contributor) + self._advance(now) + self._send_notices()
        return loss, replies

    def _send_notices(self) -> list[Reply]:
        """Replies for the pending notices of the membership."""
        notices, self.membership.notices = self.membership.notices, []
        return [reply for notice in notices for reply in self._notify(notice)]

    def _notify(self, notice: Notice) -> list[Reply]:
        contributors = self.membership.contributors.values()
        if notice is Notice.DEPARTED:
            departed = failure_frame(self.membership.departure_error)
            return [(one.peer, departed) for one in contributors if one.state is MemberState.REJOINING]
        lost, has_opened, with_a_round = self.membership.break_error, self.membership.has_opened, self._parked.members
        # These wait for the group to open or to rejoin, and have no round that could carry the error.
        waiting = [
            one
            for one in contributors
            if one.state is MemberState.REJOINING or not (has_opened or one.member in with_a_round)
        ]
        return self.break_all(lambda _: lost) + [(one.peer, failure_frame(lost)) for one in waiting]

    def _registered(self, contributor: Contributor) -> bytes:
        missing, present = self.membership.missing_for(contributor)
        return encode(
            Registered(digest(contributor.session), self._server, self.epoch, contributor.first_step, missing, present)
        )

    def _park(self, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Park a contribution until the members have returned after a server restart."""
        key = contribution.key
        if contributor.results_pending:
            raise unknown_session(contributor.session)
        if self._parked.is_full(contributor.member, key):
            raise self.open_rounds.too_many(key)
        self._parked.add(contributor, contribution, peer)
        absent = self.membership.absent
        whom = format_ranks(Members.of(absent)) if absent else "all ranks"
        text = f"waiting for {whom} to reconnect to the restarted server"
        return [(peer, pending_frame(key, 0, text))] if contribution.attempt else []

    def _answer_again(self, round_: Round, contributor: Contributor, rows: Rows, peer: bytes) -> list[Reply]:
        future = round_.futures.get(contributor.member)
        if future and future.done and not future.put(rows, peer):
            raise conflict_error(round_.key, contributor.member)
        return [(peer, round_.answer)]
