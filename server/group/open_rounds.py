"""Open rounds: starts the rounds of a group, collects contributions, ends rounds, and caches their answers.

Members in step can be one round apart, so a repeated contribution may belong to a round that has ended: it is answered
from the cache.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from server.group.contributor import Contributor
from server.group.health import GroupHealth
from server.group.lifecycle import GroupState
from server.group.membership import Membership
from server.group.recovery import ParkedContributions
from server.group.rounds import (
    Reply,
    Round,
    RoundState,
    conflict_error,
    failure_frame,
    reduce_round,
    round_failed,
    timeout_error,
    unknown_session,
)
from server.security.quota import CONTRIBUTION_BYTES, FUTURE_BYTES, ROUND_BYTES, MemoryShare, QuotaUsage
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
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey
from statsd_bn.text import wire_text
from statsd_bn.wire import encode

# A late copy of a contribution is at most as old as the data in flight on a broken connection, far less than this.
REMEMBERED_ROUNDS = 1024

# Late members named in a message.
MAX_NAMED = 8

# Read for each contribution; attribute access on an enum is slow in Python 3.11.
_RECOVERING = GroupState.RECOVERING


class OpenRounds:
    """The rounds of one epoch of a group: the open ones, the latest ended ones, and hashes of older ones."""

    def __init__(
        self, epoch: int, membership: Membership, usage: QuotaUsage, memory: MemoryShare, health: GroupHealth
    ) -> None:
        self.done = 0  # rounds that ended with an aggregate
        self.failed = 0  # rounds that ended with an error
        self.was_refused = False  # a broken group has refused a contribution
        self.last_answered = -math.inf  # time of the last answer to a round, or of the opening of the group
        self.parked = ParkedContributions(memory)
        self.recovered = membership.recovered
        # Prefix of all keys of this epoch.
        self._run = (membership.job, membership.group, epoch)
        self._membership = membership
        self._usage = usage
        self._memory = memory
        self._health = health
        self._open: dict[RoundKey, Round] = {}
        # A lower bound: the round with this deadline may have ended already.
        self._next_deadline = math.inf
        # A failed round did not wait for all members, and a member may reach it many rounds later and must still get
        # the error, so successful rounds do not evict failed ones.
        self._reduced: dict[RoundKey, Round] = {}
        self._failed: dict[RoundKey, Round] = {}
        self._ended: dict[int, None] = {}  # hashes of keys

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._open.values())

    @property
    def nr_cached(self) -> int:
        """Number of ended rounds with their answers."""
        return len(self._reduced) + len(self._failed)

    def contribute(self, now: float, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Add a member's rows to a round: the first rows start it, and the last ones end it.

        The rows of an ended round are answered from the cache, and those of a recovering group are parked.
        """
        key, rows, member = contribution.key, contribution.rows, contributor.member
        round_ = self._open.get(key)
        if round_ is None:
            if ended := self._reduced.get(key) or self._failed.get(key):
                return self._answer_again(ended, contributor, rows, peer)
            if self._membership.state is _RECOVERING:
                return self._park(contributor, contribution, peer)
            round_ = self._start(now, contributor, key, rows.values.nbytes + CONTRIBUTION_BYTES)
        elif member not in round_.futures:
            raise _not_participating(contributor, key, round_.futures)
        elif round_.futures[member].rows is None:
            self._allocate(round_, rows.values.nbytes + CONTRIBUTION_BYTES)
        contributor.step, contributor.replicas = key.step, len(rows.counts)
        future = round_.futures[member]
        if future.rows is None:
            future.since = now
            round_.gap, round_.last_contribution = now - round_.last_contribution, now
            contributor.delay += now - round_.opened
            # Repeated contributions of one thread may arrive together.
            if len(self._open) > contributor.threads and not contribution.attempt:
                self._count_threads(contributor)
        return self._put(now, round_, contributor, contribution, peer)

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
            self.last_answered = now
            self._health.record_round(now, round_, contributor)
            return self._finish(round_)
        return [(peer, self._pending(now, round_))] if contribution.attempt else []

    def _is_ready(self, round_: Round) -> bool:
        is_complete = not round_.nr_missing and self._membership.has_quorum
        return is_complete or self.recovered.can_finish(round_.key)

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
        self._add_ended(key)
        if round_ := self._open.pop(key, None):
            self.last_answered = now
            self._memory.adjust(-round_.allocated)
        self.parked.drop_round(key)

    def fail(self, key: RoundKey, error: StatsdBNError) -> list[Reply]:
        """Fail one round."""
        return self._break(self._open[key], error)

    def break_all(self, reason: Callable[[RoundKey], StatsdBNError]) -> list[Reply]:
        """Fail all open rounds and parked contributions, each with its own error."""
        parked = [(peer, contribution.key) for _, contribution, peer in self.parked.consume()]
        replies = [reply for round_ in list(self) for reply in self._break(round_, reason(round_.key))]
        return replies + [(peer, failure_frame(reason(key), key)) for peer, key in parked]

    def check_key(self, contributor: Contributor, key: RoundKey) -> None:
        """Raise ProtocolError for the round of another group or epoch."""
        if key[:3] != self._run:
            name, epoch = self._membership.name, self._run[2]
            raise ProtocolError(f"round key: expected {name}, epoch {epoch}, as {contributor} registered, got {key}")

    def has_ended(self, key: RoundKey) -> bool:
        """Whether a round has ended and left the cache."""
        return hash(key) in self._ended

    def _start(self, now: float, contributor: Contributor, key: RoundKey, size: int) -> Round:
        membership = self._membership
        if membership.lost:
            self.was_refused = True
            raise membership.lost
        self.check_key(contributor, key)
        if membership.state is not GroupState.OPEN:
            # The member has not noticed a server restart: this error makes it register again.
            raise unknown_session(contributor.session)
        if self.has_ended(key):
            raise round_failed(key, "it ended long ago, and its result is no longer cached")
        if len(self._open) >= limits.MAX_OPEN_ROUNDS:
            raise self._too_many(key)
        members = membership.participants(key.step)
        if contributor.member not in members:
            raise _not_participating(contributor, key, members)
        round_ = Round(key, members, now, contributor.deadline)
        self._allocate(round_, ROUND_BYTES + FUTURE_BYTES * len(members) + size)
        membership.record_step(key.step)
        self._next_deadline = min(self._next_deadline, now + contributor.deadline)
        self._open[key] = round_
        return round_

    def _allocate(self, round_: Round, size: int) -> None:
        self._memory.allocate(size)
        round_.allocated += size

    def _too_many(self, key: RoundKey) -> LimitExceeded:
        most = limits.MAX_OPEN_ROUNDS
        text = f"group {key.group!r} of job {key.job!r} has {most} open rounds already"
        return self._usage.exceeded(text, most, "open rounds")

    def _park(self, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Park a contribution until the members have returned after a server restart."""
        key = contribution.key
        if contributor.results_pending:
            raise unknown_session(contributor.session)
        if self.parked.is_full(contributor.member, key):
            raise self._too_many(key)
        self.parked.add(contributor, contribution, peer)
        absent = self._membership.absent
        whom = format_ranks(Members.of(absent)) if absent else "all ranks"
        text = f"waiting for {whom} to reconnect to the restarted server"
        return [(peer, _pending_frame(key, 0, text))] if contribution.attempt else []

    def _answer_again(self, round_: Round, contributor: Contributor, rows: Rows, peer: bytes) -> list[Reply]:
        future = round_.futures.get(contributor.member)
        if future and future.done and not future.put(rows, peer):
            raise conflict_error(round_.key, contributor.member)
        return [(peer, round_.answer)]

    def _count_threads(self, contributor: Contributor) -> None:
        futures = (round_.futures.get(contributor.member) for round_ in self)
        under_way = sum(future is not None and future.done for future in futures)
        contributor.threads = max(contributor.threads, 1 + under_way)

    def _finish(self, round_: Round) -> list[Reply]:
        aggregate = self.recovered.consume(round_)
        self.done += 1
        if aggregate is None:
            aggregate = reduce_round(round_)
            self.recovered.verify(aggregate)
        if aggregate.non_finite.runs:
            self._health.non_finite.record(aggregate, self._membership.contributors)
        round_.end(encode(aggregate))
        return self._close(round_)

    def _break(self, round_: Round, error: StatsdBNError, also: Iterable[bytes] = ()) -> list[Reply]:
        self.failed += 1
        round_.end(failure_frame(error, round_.key), RoundState.FAILED)
        return self._close(round_, also)

    def _close(self, round_: Round, also: Iterable[bytes] = ()) -> list[Reply]:
        """Move an ended round to the cache, and evict the oldest one with the same outcome if there are too many."""
        self._open.pop(round_.key, None)
        cached = self._failed if round_.state is RoundState.FAILED else self._reduced
        cached[round_.key] = round_
        change = len(round_.answer)
        round_.allocated += change
        if len(cached) > limits.CACHED_ROUNDS:
            oldest = cached.pop(next(iter(cached)))
            change -= oldest.allocated
            self._add_ended(oldest.key)
        self._memory.adjust(change)
        for key in self.recovered.round_ended():
            self._add_ended(key)
        return [(peer, round_.answer) for peer in dict.fromkeys((*round_.peers, *also))]

    def _add_ended(self, key: RoundKey) -> None:
        self._ended[hash(key)] = None
        if len(self._ended) > REMEMBERED_ROUNDS:
            del self._ended[next(iter(self._ended))]

    def _timeout(self, now: float, round_: Round) -> RoundTimeout:
        # Without a quorum the missing members wait for newcomers as well.
        missing = round_.missing if self._membership.has_quorum else []
        whom = format_ranks(Members.of(missing)) if len(missing) > 1 else self._describe_awaited(round_)
        return timeout_error(now, round_, self._membership.contributors, missing, whom)

    def _pending(self, now: float, round_: Round) -> bytes:
        """Reply to a repeated contribution: the missing members of its round, and where they are, if known."""
        seconds = int(now - round_.opened)
        text = f"has waited {seconds} s for {self._describe_awaited(round_)}"
        late = round_.missing if self._membership.has_quorum else []
        # Few members get requests, so most have no report.
        seen = ((member, self._membership.contributors[member].location(now)) for member in late)
        places = islice((f"rank {member} {place}" for member, place in seen if place), MAX_NAMED)
        return _pending_frame(round_.key, seconds, text, "; ".join(places))

    def _describe_awaited(self, round_: Round) -> str:
        """Text of the missing members, with their places."""
        membership = self._membership
        if not membership.has_quorum:
            return f"enough ranks ({len(membership.contributors)} of min_members {membership.min_members} are there)"
        late = ", ".join(str(membership.contributors[member]) for member in round_.missing[:MAX_NAMED])
        return f"{late} and {len(round_.missing) - MAX_NAMED} more" if len(round_.missing) > MAX_NAMED else late


def _not_participating(contributor: Contributor, key: RoundKey, members: Iterable[int]) -> RoundFailed:
    return round_failed(key, f"{contributor} is not one of the participants, ranks {Members.of(members)}")


def _pending_frame(key: RoundKey, seconds: int, text: str, where: str = "") -> bytes:
    """Pending message: the reason and the length of a member's wait."""
    return encode(Pending(key, seconds, wire_text(f"{key}: {text}"), wire_text(where)))
