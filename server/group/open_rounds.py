"""Open rounds: starts the rounds of a group, collects contributions, and ends rounds."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

import numpy as np

from server.group.contributor import Contributor
from server.group.lifecycle import GroupState
from server.group.membership import Membership
from server.group.results import Archive, FirstNonFinite, RecoveredResults, reduce_round
from server.group.rounds import (
    Reply,
    Round,
    RoundState,
    conflict_error,
    failure_frame,
    is_same_rows,
    round_failed,
    timeout_error,
    unknown_session,
)
from server.security.quota import FUTURE_BYTES, ROUND_BYTES, MemoryShare, QuotaUsage, size_of
from statsd_bn import limits
from statsd_bn.errors import (
    ContributionConflict,
    LimitExceeded,
    ProtocolError,
    RoundFailed,
    RoundTimeout,
    StatsdBNError,
)
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import Contribution, Pending
from statsd_bn.reduction import FloatArray, is_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.skew_samples import SCHEDULED_BYTES, VECTORS, SkewSampler, figures_of_step
from statsd_bn.text import wire_text
from statsd_bn.timing import Histogram
from statsd_bn.wire import encode

# Memory for the sampled rows of one step; larger steps keep fewer channels and layers.
MAX_SAMPLE_BYTES = 2**18


# Late members named in a message.
MAX_NAMED = 8


class OpenRounds:
    """The open rounds of one epoch of a group; ended rounds go to its archive."""

    def __init__(
        self, epoch: int, membership: Membership, usage: QuotaUsage, archive: Archive, recovered: RecoveredResults
    ) -> None:
        self.done = 0  # rounds that ended with an aggregate
        self.failed = 0  # rounds that ended with an error
        self.non_finite = FirstNonFinite()
        self.durations = Histogram()  # of the rounds that ended with their last contribution
        self.lateness = Histogram()  # gaps between the last two contributions, with those reported of shared memory
        self.was_refused = False  # a broken group has refused a contribution
        self.last_answered = -math.inf  # time of the last answer to a round, or of the opening of the group
        self._samples = SkewSampler(MAX_SAMPLE_BYTES)
        # Prefix of all keys of this epoch.
        self._run = (membership.job, membership.group, epoch)
        self._membership = membership
        self._usage = usage
        self._archive = archive
        self._recovered = recovered
        self._open: dict[RoundKey, Round] = {}
        # A lower bound: the round with this deadline may have ended already.
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._open.values())

    def contribute(self, now: float, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Add a member's rows to a round; the first rows start it."""
        key, rows = contribution.key, contribution.rows
        if round_ := self._open.get(key):
            future = round_.futures.get(contributor.member)
            if future is None:
                raise _not_participating(contributor, key, round_.futures)
            is_first = future.rows is None
            if is_first:
                self._reserve(round_, size_of(rows))
        else:
            round_ = self._start(now, contributor, key, size_of(rows))
            future, is_first = round_.futures[contributor.member], True
        contributor.step, contributor.replicas = key.step, len(rows.counts)
        if is_first:
            future.since = now
            round_.gap, round_.last_contribution = now - round_.last_contribution, now
            contributor.delay += now - round_.opened
            # Repeated contributions of one thread may arrive together.
            if len(self._open) > contributor.threads and not contribution.attempt:
                self._count_threads(contributor)
        return self._put(now, round_, contributor, contribution, peer)

    def withdraw(self, contributor: Contributor) -> list[Reply]:
        """Stop waiting for a member, and end the rounds in which only its rows were missing."""
        for round_ in self:
            round_.withdraw(contributor.member)
        return self.complete()

    def complete(self) -> list[Reply]:
        """End the rounds without a missing member."""
        ready = [round_ for round_ in self if self._is_ready(round_)]
        return [reply for round_ in ready for reply in self._finish(round_)]

    def expire(self, now: float) -> list[Reply]:
        """Fail the rounds that have reached their deadlines."""
        if now < self._next_deadline:
            return []
        over = [round_ for round_ in self if now >= round_.opened + round_.seconds]
        self.last_answered = now if over else self.last_answered
        replies = [reply for round_ in over for reply in self._break(round_, self._timeout(now, round_))]
        self._next_deadline = min((round_.opened + round_.seconds for round_ in self), default=math.inf)
        return replies

    def discard(self, now: float, key: RoundKey) -> None:
        """Drop a round that its members finished in shared memory; a late contribution must not start it again."""
        self._archive.add_ended(key)
        if round_ := self._open.pop(key, None):
            self.last_answered = now
            self._archive.memory.adjust(-round_.allocated)

    def fail(self, key: RoundKey, error: StatsdBNError) -> list[Reply]:
        """Fail one round."""
        return self._break(self._open[key], error)

    def break_all(self, reason: Callable[[RoundKey], StatsdBNError]) -> list[Reply]:
        """Fail all rounds, each with its own error."""
        return [reply for round_ in list(self) for reply in self._break(round_, reason(round_.key))]

    def check_key(self, contributor: Contributor, key: RoundKey) -> None:
        """Raise ProtocolError for the round of another group or epoch."""
        if key[:3] != self._run:
            name, epoch = self._membership.name, self._run[2]
            raise ProtocolError(f"round key: expected {name}, epoch {epoch}, as {contributor} registered, got {key}")

    def too_many(self, key: RoundKey) -> LimitExceeded:
        """Error of a group with too many open rounds."""
        most = limits.MAX_OPEN_ROUNDS
        text = f"group {key.group!r} of job {key.job!r} has {most} open rounds already"
        return self._usage.exceeded(text, most, "open rounds")

    def _start(self, now: float, contributor: Contributor, key: RoundKey, size: int) -> Round:
        membership = self._membership
        if membership.state is GroupState.BROKEN:
            self.was_refused = True
            raise membership.break_error
        self.check_key(contributor, key)
        if membership.state is not GroupState.OPEN:
            # The member has not noticed a server restart: this error makes it register again.
            raise unknown_session(contributor.session)
        if self._archive.has_ended(key):
            raise round_failed(key, "it ended long ago, and its result is no longer cached")
        if len(self._open) >= limits.MAX_OPEN_ROUNDS:
            raise self.too_many(key)
        members = membership.participants(key.step)
        if contributor.member not in members:
            raise _not_participating(contributor, key, members)
        round_ = Round(key, members, now, contributor.deadline)
        self._reserve(round_, ROUND_BYTES + FUTURE_BYTES * len(members) + size)
        membership.record_step(key.step)
        self._next_deadline = min(self._next_deadline, now + contributor.deadline)
        self._open[key] = round_
        return round_

    def _reserve(self, round_: Round, size: int) -> None:
        self._archive.memory.allocate(size)
        round_.allocated += size

    def _count_threads(self, contributor: Contributor) -> None:
        futures = (round_.futures.get(contributor.member) for round_ in self)
        under_way = sum(future is not None and future.done for future in futures)
        contributor.threads = max(contributor.threads, 1 + under_way)

    def _put(
        self, now: float, round_: Round, contributor: Contributor, contribution: Contribution, peer: bytes
    ) -> list[Reply]:
        try:
            round_.put(contributor.member, contribution.rows, peer)
        except ContributionConflict as conflict:
            earlier = round_.futures[contributor.member].peer
            frame = failure_frame(conflict, round_.key)
            return [(address, frame) for address in dict.fromkeys((earlier, peer)) if address]
        except RoundFailed as error:
            self.last_answered = now
            return self._break(round_, error, also=[peer])
        if self._is_ready(round_):
            return self._complete(now, round_, contributor)
        return [(peer, self._pending(now, round_))] if contribution.attempt else []

    def _complete(self, now: float, round_: Round, last: Contributor) -> list[Reply]:
        """End a round with its last contribution."""
        self.last_answered = now
        self.durations.add(now - round_.opened)
        last.lateness.add(round_.gap)
        self.lateness.add(round_.gap)
        if self._samples.is_due(now, round_.key):
            self._sample(now, round_)
        return self._finish(round_)

    def _sample(self, now: float, round_: Round) -> None:
        """Sample finite rows of a layer for the skew figures if all members of a strict group have contributed."""
        membership, memory, samples = self._membership, self._archive.memory, self._samples
        # Skew needs two members.
        if membership.is_elastic or not round_.is_complete or len(round_.futures) < max(2, membership.world_size):
            return
        rows = [future.get() for future in round_.futures.values()]
        if rows[0].values.shape[1] != VECTORS:
            return
        before = samples.size
        with suppress(LimitExceeded):  # without memory the round is not sampled
            memory.check(MAX_SAMPLE_BYTES + SCHEDULED_BYTES)
            stride = samples.stride(sum(one.values.nbytes for one in rows))
            values = np.concatenate([one.values[..., ::stride] for one in rows])
            if is_finite(values):
                counts = [count for one in rows for count in one.counts]
                samples.observe(now, round_.key, counts, [len(one.counts) for one in rows], values)
            memory.adjust(samples.size - before)

    def consume_samples(self, now: float) -> tuple[int, dict[str, FloatArray]] | None:
        """The sampled step and the figures of its layers by name; None without a sample."""
        before = self._samples.size
        samples = self._samples.drain(now)
        self._archive.memory.adjust(self._samples.size - before)
        return figures_of_step(samples)

    def _is_ready(self, round_: Round) -> bool:
        if round_.is_complete and self._membership.has_quorum:
            return True
        return bool(self._recovered.results) and self._recovered.can_finish(round_)

    def _finish(self, round_: Round) -> list[Reply]:
        recovered = self._recovered.consume(round_) if self._recovered.results else None
        self.done += 1
        aggregate = recovered or reduce_round(round_)
        if self._recovered.results and not recovered:
            self._recovered.verify(aggregate)
        if aggregate.non_finite.runs:
            self.non_finite.record(aggregate, self._membership.contributors)
        round_.end(encode(aggregate))
        return self._close(round_)

    def _break(self, round_: Round, error: StatsdBNError, also: Iterable[bytes] = ()) -> list[Reply]:
        self.failed += 1
        round_.end(failure_frame(error, round_.key), RoundState.FAILED)
        return self._close(round_, also)

    def _close(self, round_: Round, also: Iterable[bytes] = ()) -> list[Reply]:
        self._open.pop(round_.key, None)
        self._archive.add(round_)
        for key in self._recovered.round_ended() if self._recovered.results else ():
            self._archive.add_ended(key)
        return [(peer, round_.answer) for peer in dict.fromkeys((*round_.peers, *also))]

    def _timeout(self, now: float, round_: Round) -> RoundTimeout:
        # Without a quorum the missing members wait for newcomers as well.
        missing = round_.missing if self._membership.has_quorum else []
        whom = format_ranks(Members.of(missing)) if len(missing) > 1 else self._describe_awaited(round_)
        return timeout_error(now, round_, self._membership.contributors, missing, whom)

    def _pending(self, now: float, round_: Round) -> bytes:
        """Reply to a repeated contribution: the missing members of its round."""
        seconds = int(now - round_.opened)
        text = f"has waited {seconds} s for {self._describe_awaited(round_)}"
        return pending_frame(round_.key, seconds, text, self._describe_locations(round_, now))

    def _describe_awaited(self, round_: Round) -> str:
        """Text of the missing members, with their places."""
        membership = self._membership
        if not membership.has_quorum:
            return f"enough ranks ({len(membership.contributors)} of min_members {membership.min_members} are there)"
        late = ", ".join(str(membership.contributors[member]) for member in round_.missing[:MAX_NAMED])
        return f"{late} and {len(round_.missing) - MAX_NAMED} more" if len(round_.missing) > MAX_NAMED else late

    def _describe_locations(self, round_: Round, now: float) -> str:
        """Places of the late members with a stack report, one sentence each."""
        if not self._membership.has_quorum:
            return ""
        late = (self._membership.contributors[member] for member in round_.missing)
        # Few members get requests, so most have no report.
        seen = islice(((contributor, where) for contributor in late if (where := contributor.location(now))), MAX_NAMED)
        return "; ".join(f"rank {contributor.member} {where}" for contributor, where in seen)


def _not_participating(contributor: Contributor, key: RoundKey, members: Iterable[int]) -> RoundFailed:
    return round_failed(key, f"{contributor} is not one of the participants, ranks {Members.of(members)}")


def pending_frame(key: RoundKey, seconds: int, text: str, where: str = "") -> bytes:
    """Pending message: the reason and the length of a member's wait."""
    return encode(Pending(key, seconds, wire_text(f"{key}: {text}"), wire_text(where)))


ParkedContribution = tuple[Contributor, Contribution, bytes]
"""Member, contribution, and the peer that sent it."""


class ParkedContributions:
    """Contributions to a recovering group, one for each member and round."""

    def __init__(self, memory: MemoryShare) -> None:
        self._memory = memory
        self._parked: dict[int, dict[RoundKey, ParkedContribution]] = {}

    @property
    def members(self) -> set[int]:
        """Members with a parked contribution."""
        return {member for member, rounds in self._parked.items() if rounds}

    def is_full(self, member: int, key: RoundKey) -> bool:
        """Whether a member already has as many parked contributions as possible, all to other rounds."""
        rounds = self._parked.get(member, {})
        return len(rounds) >= limits.MAX_OPEN_ROUNDS and key not in rounds

    def add(self, contributor: Contributor, contribution: Contribution, peer: bytes) -> None:
        """Park a contribution; a repeated one updates the peer. Raises LimitExceeded or ContributionConflict."""
        key, rounds = contribution.key, self._parked.setdefault(contributor.member, {})
        if earlier := rounds.get(key):
            if not is_same_rows(earlier[1].rows, contribution.rows):
                raise conflict_error(key, contributor.member)
        else:
            self._memory.allocate(size_of(contribution.rows))
        rounds[key] = contributor, contribution, peer

    def consume(self) -> list[ParkedContribution]:
        """Remove and return all contributions, each member's in order of arrival."""
        return [parked for member in list(self._parked) for parked in self.drop_member(member)]

    def drop_member(self, member: int) -> list[ParkedContribution]:
        """Remove and return the contributions of a member."""
        dropped = list(self._parked.pop(member, {}).values())
        self._memory.adjust(-sum(size_of(contribution.rows) for _, contribution, _ in dropped))
        return dropped

    def drop_round(self, key: RoundKey) -> None:
        """Drop the contributions to a round."""
        for rounds in self._parked.values():
            if parked := rounds.pop(key, None):
                self._memory.adjust(-size_of(parked[1].rows))
