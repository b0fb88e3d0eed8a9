"""SyncMaster: collects and reduces the contributions of one group.

Pure: messages, peers and times go in, replies come out. Without a socket, thread or clock, a test can play years of
faults in seconds.
"""

import math
from collections.abc import Callable, Iterable
from itertools import islice

from server.group.contributor import Contributor
from server.group.health import GroupHealth
from server.group.lifecycle import GroupState, MemberState, Notice
from server.group.membership import Membership
from server.group.recovery import ParkedContributions, RecoveredResult
from server.group.rounds import Reply, Round, RoundState, reduce_round, round_failed
from server.security import quota
from server.security.quota import MemoryShare, QuotaUsage
from statsd_bn import errors, limits, messages
from statsd_bn.errors import StatsdBNError
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import Aggregate, Contribution, Heartbeat, NonFiniteRound, Pending, Register, Registered, digest
from statsd_bn.reduction import Rows, find_non_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.text import MAX_ROWS, Row, TableSection, error_text, wire_text
from statsd_bn.wire import encode, encode_failure

# Remembered evicted rounds, to refuse late contributions. A broken connection has far fewer messages in flight.
REMEMBERED_ROUNDS = 1024

MAX_NAMED = 8  # late members named in a message
LATE_ADVICE = "Check the missing ranks' logs, or raise connect(round_timeout=...) if a step may take longer."


class SyncMaster:
    """One epoch of one group: its members, its open rounds, and the latest ended ones.

    Even members in lockstep can be one round apart, so a repeated contribution may belong to a round that has ended:
    the cache has the answer.

    Args:
        server: random id of this server process.
        register: the registration that starts the group; it sets job, group, epoch and policy.
        usage: the server's memory accounting.
        tenant: the group's memory counts against this tenant's quota; default: a tenant for the job alone.

    Raises:
        LimitExceeded: no memory is left for another group.
    """

    # Synchronized-BatchNorm-PyTorch's name for reducing a round.
    run_master = staticmethod(reduce_round)

    def __init__(self, server: bytes, register: Register, usage: QuotaUsage | None = None, tenant: str = "") -> None:
        self.epoch = register.epoch
        self.logged_cause = ""  # of the latest logged leave
        self.deadlock_at = -math.inf  # when the latest deadlock of the job was reported; set only in the group `world`
        self.broken_notified_at: float | None = None  # when members outside of its rounds were notified
        self.why_not_faster = ""
        self._rounds_without_server = 0
        self._last_progress = -math.inf
        self._server = server
        self._usage = usage = usage or QuotaUsage()
        self.membership = Membership(register, usage.quota.silence_seconds)
        self.tenant = tenant or f"job {register.job!r}"
        self.memory = MemoryShare(usage, self.tenant)
        self.memory.allocate(quota.GROUP_BYTES)
        self._accounted = 0
        self.health = GroupHealth(self.membership, self.memory)
        self.open_rounds: dict[RoundKey, Round] = {}
        self._run = (register.job, register.group, register.epoch)  # prefix of the keys of all rounds
        self.done = self.failed = 0  # rounds that ended with an aggregate or an error
        self.was_refused = False  # a broken group has refused a contribution
        self.last_answered = -math.inf  # time of the last answer to a round, or of the opening of the group
        self.parked = ParkedContributions(self.memory)
        # A failed round did not wait for all members: a late member may reach it many rounds later, and must still get
        # the error. So successful rounds do not evict failed ones.
        self._cached_results: dict[RoundKey, Round] = {}
        self._cached_failures: dict[RoundKey, Round] = {}
        self._ended: dict[int, None] = {}  # hashes of the keys of older rounds

    @property
    def rounds_done(self) -> int:
        """Number of successful rounds, including those that bypassed the server."""
        return self.done + self._rounds_without_server

    @property
    def last_active(self) -> float:
        """Time of the last ended round, or of the last reported progress in rounds that bypass the server."""
        return max(self.last_answered, self._last_progress)

    @property
    def nr_slaves(self) -> int:
        """Number of registered members."""
        return len(self.membership.contributors)

    def register_slave(self, now: float, register: Register, peer: bytes) -> tuple[Contributor, list[Reply]]:
        """Register a member. The reply counts the missing members; once all are registered, every member gets a reply.

        Raises:
            RegistrationRefused: the reason of a refusal.
            ReplicaLost, ContributionConflict: the group is broken, can never rejoin, or continued without the member.
            LimitExceeded: no memory is left for another member.
        """
        more = 0 if register.member in self.membership.contributors else quota.MEMBER_BYTES
        if register.was_in_group and not self.membership.has_opened:
            more += quota.EXPECTED_BYTES * len(register.known)
        if more:  # a registered member may repeat its registration even without free memory
            self.memory.check(more)
        contributor = self.membership.admit(now, register, peer)
        self._update_memory()
        takes_part = contributor.state is MemberState.TAKES_PART
        replies = [] if takes_part else self._withdraw(contributor)
        replies += self._advance(now) or [(peer, self._registered(contributor))]
        return contributor, replies + self._complete()

    def contribute(self, now: float, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Add a member's rows to a round: the first rows start it, and the last ones end it.

        Rows for an ended round get the cached answer, and rows for a recovering group are parked.
        """
        try:
            round_ = self.open_rounds.get(contribution.key)
            if round_ is None:
                if ended := self._cached_results.get(contribution.key) or self._cached_failures.get(contribution.key):
                    return self._answer_again(ended, contributor, contribution.rows, peer)
                if self.membership.is_recovering:
                    return self._park(contributor, contribution, peer)
            return self._add_rows(now, round_, contributor, contribution, peer)
        except StatsdBNError as error:
            return [(peer, encode_failure(error, contribution.key))]

    def _add_rows(
        self, now: float, round_: Round | None, contributor: Contributor, contribution: Contribution, peer: bytes
    ) -> list[Reply]:
        key, rows, member = contribution.key, contribution.rows, contributor.member
        if round_ is None:
            round_ = self._start(now, contributor, key, quota.size_of(rows))
        elif member not in round_.futures:
            raise _not_participating(contributor, key, round_.futures)
        elif round_.futures[member].rows is None:
            self._allocate(round_, quota.size_of(rows))
        contributor.step, contributor.replicas = key.step, len(rows.counts)
        future = round_.futures[member]
        if future.rows is None:
            future.since = now
            round_.gap, round_.last_contribution = now - round_.last_contribution, now
            contributor.delay += now - round_.opened
            # A repeat does not count: repeats by one thread may arrive together.
            if len(self.open_rounds) > contributor.threads and not contribution.attempt:
                self._count_threads(contributor)
        try:
            round_.put(member, rows, peer)
        except errors.ContributionConflict as conflict:
            frame = encode_failure(conflict, key)
            return [(address, frame) for address in dict.fromkeys((future.peer, peer)) if address]
        except errors.RoundFailed as error:
            self.last_answered = now
            return self._break(round_, error, also=[peer])
        if self._is_ready(round_):
            self.last_answered = now
            self.health.record_round(now, round_, contributor)
            return self._finish(round_)
        return [(peer, self._pending(now, round_))] if contribution.attempt else []

    def _is_ready(self, round_: Round) -> bool:
        is_complete = not round_.nr_missing and self.membership.has_quorum
        return is_complete or self.membership.recovered.can_finish(round_.key)

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
        """Record the origin of a NaN or infinity in a round over a process group."""
        self._check_key(contributor, report.key)
        self.health.non_finite.record(report.key, report.members, report.what, self.membership.contributors)

    def finish_round(self, now: float, contributor: Contributor, key: RoundKey) -> None:
        """Drop a round that the members finished over another transport; elastic groups have no such rounds."""
        self._check_key(contributor, key)
        if self.membership.is_elastic:
            return
        self._add_ended(key)  # a late contribution must not start it again
        if round_ := self.open_rounds.pop(key, None):
            self.last_answered = now
            self.memory.adjust(-round_.allocated)
        self.parked.drop_round(key)

    def record_result(self, now: float, contributor: Contributor, aggregate: Aggregate, peer: bytes) -> list[Reply]:
        """Record an aggregate that the member received before a server restart, see `server.group.recovery`."""
        key = aggregate.key
        try:
            self._check_key(contributor, key)
        except StatsdBNError as error:
            return [(peer, encode_failure(error, key))]
        membership = self.membership
        if not (membership.is_recovering and (contributor.results_pending or key in contributor.recovered)):
            return []  # the group has recovered, or the member announced fewer results
        if key not in membership.recovered.results:
            self.memory.check(RecoveredResult(aggregate, contributor).size)
        membership.record_result(contributor, aggregate)
        self._update_memory()
        # Only a member's last announced result can complete the recovery, so the thousands of others need no check.
        return [] if contributor.results_pending else self._advance(now)

    def remove_contributor(
        self, now: float, contributor: Contributor, cause: str, *, is_lost: bool = False
    ) -> tuple[errors.ReplicaLost | None, list[Reply]]:
        """Remove a member that leaves or is lost; returns the error for its late messages, and replies to the others.

        `cause` is the exception with which it leaves, "" if there was none, or the reason to consider it lost.
        """
        loss = self.membership.remove(contributor, cause, is_lost=is_lost)
        self.parked.drop_member(contributor.member)
        self._update_memory()
        replies = self._send_notices()
        if self.membership.state is not GroupState.BROKEN:
            replies += self._withdraw(contributor) + self._advance(now)
        return loss, replies

    def expire(self, now: float) -> list[Reply]:
        """End rounds, and the recovery after a server restart, at their deadlines."""
        self.membership.expire(now)
        self._update_memory()
        self.health.update_pace(now, self.rounds_done)
        replies = self._send_notices() + self._advance(now)
        for round_ in [one for one in self.open_rounds.values() if now >= one.opened + one.seconds]:
            self.last_answered = now
            replies += self._break(round_, self._timeout(now, round_))
        return replies

    def fail(self, key: RoundKey, error: StatsdBNError) -> list[Reply]:
        """Fail one round."""
        return self._break(self.open_rounds[key], error)

    def break_all(self, reason: Callable[[RoundKey], StatsdBNError]) -> list[Reply]:
        """Fail all open rounds and parked contributions, each with its own error."""
        parked = [(peer, contribution.key) for _, contribution, peer in self.parked.consume()]
        rounds = list(self.open_rounds.values())
        replies = [reply for round_ in rounds for reply in self._break(round_, reason(round_.key))]
        return replies + [(peer, encode_failure(reason(key), key)) for peer, key in parked]

    def stop(self) -> list[Reply]:
        """End all open rounds, and the wait for the group to open: the server stops and has no successor."""
        why = "the server stopped because the process that started it ended"
        replies = self.break_all(lambda key: errors.MasterStopped(error_text(why, where=str(key))))
        if self.membership.state not in {GroupState.FILLING, GroupState.RECOVERING}:
            return replies
        text = error_text("the server stopped before the group was complete", where=self.membership.name)
        stopped = encode_failure(errors.MasterStopped(text))
        return replies + [(contributor.peer, stopped) for contributor in self.membership.contributors.values()]

    def _check_key(self, contributor: Contributor, key: RoundKey) -> None:
        """Raise ProtocolError for the round of another group or epoch."""
        if key[:3] != self._run:
            name = f"{self.membership.name}, epoch {self.epoch}"
            raise errors.ProtocolError(f"round key: expected {name}, as {contributor} registered, got {key}")

    def _update_memory(self) -> None:
        """Update the memory accounted for members and figures, and in a recovery for expected members and results."""
        membership = self.membership
        size = quota.MEMBER_BYTES * self.nr_slaves + quota.EXPECTED_BYTES * len(membership.expected)
        size += self.health.comparison.size + membership.recovered.size
        self.memory.adjust(size - self._accounted)
        self._accounted = size

    def _advance(self, now: float) -> list[Reply]:
        """Open the group or start a pass if no member is missing; returns the replies."""
        if not self.membership.advance(now):
            return []
        self.last_answered = now
        replies = [(one.peer, self._registered(one)) for one in self.membership.contributors.values()]
        recovered = self.membership.recovered
        if contradiction := recovered.contradiction():
            self.membership.break_for(contradiction)
            return replies + self._send_notices()
        # Parked rows come before recovered results: if they complete a round, the server adds them and uses no result.
        for contributor, contribution, peer in self.parked.consume():
            replies += self.contribute(now, contributor, contribution, peer)
        recovered.enabled = True
        return replies + (self._complete() if recovered.results else [])

    def _withdraw(self, contributor: Contributor) -> list[Reply]:
        """Stop waiting for a member, and end the rounds in which only its rows were missing."""
        for round_ in self.open_rounds.values():
            round_.withdraw(contributor.member)
        return self._complete()

    def _complete(self) -> list[Reply]:
        """End the rounds without a missing member."""
        ready = [round_ for round_ in self.open_rounds.values() if self._is_ready(round_)]
        return [reply for round_ in ready for reply in self._finish(round_)]

    def _send_notices(self) -> list[Reply]:
        """Replies for the pending notices of the membership."""
        notices, self.membership.notices = self.membership.notices, []
        return [reply for notice, error in notices for reply in self._notify(notice, error)]

    def _notify(self, notice: Notice, error: StatsdBNError) -> list[Reply]:
        is_broken, has_opened = notice is Notice.BROKEN, self.membership.has_opened
        with_a_round = self.parked.members
        # Members that wait for the group to open or for others to rejoin, and have no round that could carry the error.
        waiting = [
            one.peer
            for one in self.membership.contributors.values()
            if one.state is MemberState.REJOINING or (is_broken and not (has_opened or one.member in with_a_round))
        ]
        replies = self.break_all(lambda _: error) if is_broken else []
        frame = encode_failure(error)
        return replies + [(peer, frame) for peer in waiting]

    def _registered(self, contributor: Contributor) -> bytes:
        missing, present = self.membership.missing_for(contributor)
        token, first_step = digest(contributor.session), contributor.first_step
        return encode(Registered(token, self._server, self.epoch, first_step, missing, present))

    def _start(self, now: float, contributor: Contributor, key: RoundKey, size: int) -> Round:
        membership = self.membership
        if membership.lost:
            self.was_refused = True
            raise membership.lost
        self._check_key(contributor, key)
        if membership.state is not GroupState.OPEN:
            # The member has not noticed a server restart: this error makes it register again.
            raise messages.unknown_session(contributor.session)
        if hash(key) in self._ended:
            raise round_failed(key, "it ended long ago, and its result is no longer cached")
        if len(self.open_rounds) >= limits.MAX_OPEN_ROUNDS:
            raise self._too_many(key)
        members = membership.participants(key.step)
        if contributor.member not in members:
            raise _not_participating(contributor, key, members)
        round_ = Round(key, members, now, contributor.deadline)
        self._allocate(round_, quota.ROUND_BYTES + quota.FUTURE_BYTES * len(members) + size)
        membership.record_step(key.step)
        self.open_rounds[key] = round_
        return round_

    def _allocate(self, round_: Round, size: int) -> None:
        self.memory.allocate(size)
        round_.allocated += size

    def _too_many(self, key: RoundKey) -> errors.LimitExceeded:
        most = limits.MAX_OPEN_ROUNDS
        text = f"group {key.group!r} of job {key.job!r} has {most} open rounds already"
        return self._usage.exceeded(text, most, "open rounds")

    def _park(self, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Park a contribution until the members have returned after a server restart."""
        key = contribution.key
        if contributor.results_pending:
            raise messages.unknown_session(contributor.session)
        if self.parked.is_full(contributor.member, key):
            raise self._too_many(key)
        self.parked.add(contributor, contribution, peer)
        absent = self.membership.absent
        whom = format_ranks(Members.of(absent)) if absent else "all ranks"
        text = f"waiting for {whom} to reconnect to the restarted server"
        return [(peer, _pending_frame(key, 0, text))] if contribution.attempt else []

    def _answer_again(self, round_: Round, contributor: Contributor, rows: Rows, peer: bytes) -> list[Reply]:
        future = round_.futures.get(contributor.member)
        if future and future.done:
            round_.put(contributor.member, rows, peer)
        return [(peer, round_.answer)]

    def _count_threads(self, contributor: Contributor) -> None:
        futures = (round_.futures.get(contributor.member) for round_ in self.open_rounds.values())
        under_way = sum(future is not None and future.done for future in futures)
        contributor.threads = max(contributor.threads, 1 + under_way)

    def _finish(self, round_: Round) -> list[Reply]:
        aggregate = self.membership.recovered.consume(round_)
        self.done += 1
        if aggregate is None:
            aggregate = reduce_round(round_)
            self.membership.recovered.verify(aggregate)
        if aggregate.non_finite.runs:
            what = str(find_non_finite(aggregate.values))
            self.health.non_finite.record(round_.key, aggregate.non_finite, what, self.membership.contributors)
        round_.end(encode(aggregate))
        return self._close(round_)

    def _break(self, round_: Round, error: StatsdBNError, also: Iterable[bytes] = ()) -> list[Reply]:
        self.failed += 1
        round_.end(encode_failure(error, round_.key), RoundState.FAILED)
        return self._close(round_, also)

    def _close(self, round_: Round, also: Iterable[bytes] = ()) -> list[Reply]:
        """Move an ended round to the cache, and evict the oldest one with the same outcome if there are too many."""
        self.open_rounds.pop(round_.key, None)
        cached = self._cached_failures if round_.state is RoundState.FAILED else self._cached_results
        cached[round_.key] = round_
        change = len(round_.answer)
        round_.allocated += change
        if len(cached) > limits.CACHED_ROUNDS:
            oldest = cached.pop(next(iter(cached)))
            change -= oldest.allocated
            self._add_ended(oldest.key)
        self.memory.adjust(change)
        for key in self.membership.recovered.round_ended():
            self._add_ended(key)
        return [(peer, round_.answer) for peer in dict.fromkeys((*round_.peers, *also))]

    def _add_ended(self, key: RoundKey) -> None:
        self._ended[hash(key)] = None
        if len(self._ended) > REMEMBERED_ROUNDS:
            del self._ended[next(iter(self._ended))]

    def _timeout(self, now: float, round_: Round) -> errors.RoundTimeout:
        """Error of a round at its deadline, with a table of the missing and the waiting ranks."""
        key, contributors, waiting = round_.key, self.membership.contributors, round_.waiting
        # Without a quorum all wait for newcomers, and none is late.
        missing = round_.missing if self.membership.has_quorum else []
        whom = format_ranks(Members.of(missing)) if len(missing) > 1 else self._describe_awaited(round_)
        where = key.describe(with_call=key.call > 0)
        late, there = [], []
        for member in missing[:MAX_ROWS]:
            name, position = str(contributors[member]), contributors[member].position(now)
            late.append(Row((name, "missing", f"from {where}"), (f"{name} {position}",) if position else ()))
        for member in waiting[:MAX_ROWS]:
            name = str(contributors.get(member, f"rank {member}"))  # it may have left since its contribution
            there.append(Row((name, f"waits {now - round_.futures[member].since:.1f} s", f"in {where}")))
        table = [TableSection(late, len(missing), "missing"), TableSection(there, len(waiting), f"in {where}")]
        table = [section for section in table if section.rows]
        text = f"{whom} did not arrive within {round_.seconds:g} s"
        text = error_text(text, table=table, where=str(key), advice=LATE_ADVICE)
        return errors.RoundTimeout(text, **key.fields, missing=missing, waiting=waiting, seconds=round_.seconds)

    def _pending(self, now: float, round_: Round) -> bytes:
        """Reply to a repeated contribution: the missing members of its round, and where they are, if known."""
        seconds = int(now - round_.opened)
        text = f"has waited {seconds} s for {self._describe_awaited(round_)}"
        late = round_.missing if self.membership.has_quorum else []
        # Few members get stack requests, so most have no report.
        seen = ((member, self.membership.contributors[member].position(now)) for member in late)
        positions = islice((f"rank {member} {position}" for member, position in seen if position), MAX_NAMED)
        return _pending_frame(round_.key, seconds, text, "; ".join(positions))

    def _describe_awaited(self, round_: Round) -> str:
        """Text of the missing members, with their places."""
        membership = self.membership
        if not membership.has_quorum:
            return f"enough ranks ({len(membership.contributors)} of min_members {membership.min_members} are there)"
        late = ", ".join(str(membership.contributors[member]) for member in round_.missing[:MAX_NAMED])
        return f"{late} and {len(round_.missing) - MAX_NAMED} more" if len(round_.missing) > MAX_NAMED else late


def _not_participating(contributor: Contributor, key: RoundKey, members: Iterable[int]) -> errors.RoundFailed:
    return round_failed(key, f"{contributor} is not one of the participants, ranks {Members.of(members)}")


def _pending_frame(key: RoundKey, seconds: int, text: str, where: str = "") -> bytes:
    """Pending message: the reason and the length of a member's wait."""
    return encode(Pending(key, seconds, wire_text(f"{key}: {text}"), wire_text(where)))
