"""The open rounds of one group: how they begin, what they take, and how they end."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from server.group.contributor import Contributor
from server.group.first_non_finite import FirstNonFinite
from server.group.lifecycle import GroupState
from server.group.membership import Membership
from server.group.results import Archive, Claims, reduce_round
from server.group.rounds import Reply, Round, conflict, failed, failure, late_table, same, unknown
from server.security.quota import FUTURE_BYTES, ROUND_BYTES, Budget, Room, size_of
from statsd_bn import limits
from statsd_bn.errors import (
    ContributionConflict,
    LimitExceeded,
    ProtocolError,
    RoundFailed,
    RoundTimeout,
    StatsdBNError,
)
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.messages import Aggregate, Contribution, Pending
from statsd_bn.reduction import FloatArray, is_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.skew_samples import KNOWN_BYTES, VECTORS, Samples, told_by
from statsd_bn.text import told
from statsd_bn.timing import Histogram
from statsd_bn.wire import encode

# What is kept of one step's rows; of what is more, fewer channels and layers.
MOST_LOOKS_BYTES = 2**18


class Looks:
    """Those of one group."""

    def __init__(self) -> None:
        self._samples = Samples(MOST_LOOKS_BYTES)

    def are_due(self, now: float, key: RoundKey) -> bool:
        """Whether to keep something of a round."""
        return self._samples.is_due(now, key)

    @property
    def kept(self) -> int:
        """How many bytes are kept: rows, `MOST_LOOKS_BYTES` at most, and the names of layers."""
        return self._samples.size

    def add(self, now: float, key: RoundKey, rows: Sequence[Rows]) -> None:
        """Keep something of what all members have brought, in their order, if it is of a layer, and finite."""
        if rows[0].values.shape[1] != VECTORS:
            return
        stride = self._samples.stride(sum(one.values.nbytes for one in rows))
        values = np.concatenate([one.values[..., ::stride] for one in rows])
        if is_finite(values):
            counts = [count for one in rows for count in one.counts]
            self._samples.look(now, key, counts, [len(one.counts) for one in rows], values)

    def take(self, now: float) -> tuple[int, dict[str, FloatArray]] | None:
        """The step that was looked at, and the figures of its layers by name; None where nothing is due."""
        return told_by(self._samples.take(now))


# How many late members a message names.
TOLD_OF = 8


class OpenRounds:
    """The rounds of one life of a group that have not ended; those that end go into its archive.

    Args:
        epoch: of this life.
        membership: who takes part.
        budget: what the server agrees to keep.
        archive: of this life.
        claims: what members were given before a restart of the server.

    Attributes:
        done: how many have ended with an aggregate.
        failed: how many have ended with an error.
        non_finite: whose NaN or infinity came first.
        lengths: how long each round was open that ended as its last contribution came.
        lateness: how much later that one came than the one before; in rounds in memory too, as the members say.
        was_refused: whether a member came to a round after the group was broken.
        answered: when members were last told that one has ended, or that the group is open.
    """

    def __init__(
        self,
        epoch: int,
        membership: Membership,
        budget: Budget,
        archive: Archive,
        claims: Claims,
    ) -> None:
        self.done = 0
        self.failed = 0
        self.non_finite = FirstNonFinite()
        self.lengths = Histogram()
        self.lateness = Histogram()
        self.was_refused = False
        self.answered = -math.inf
        self._looks = Looks()
        # What all keys of this life begin with.
        self._run = (membership.job, membership.group, epoch)
        self._membership = membership
        self._budget = budget
        self._archive = archive
        self._claims = claims
        self._open: dict[RoundKey, Round] = {}
        # No open round ends before; the one that was first may have ended since.
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._open.values())

    def contribute(self, now: float, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Take a member's rows for one round; the first rows begin the round."""
        key, rows = contribution.key, contribution.rows
        try:
            if round_ := self._open.get(key):
                future = round_.futures.get(contributor.member)
                if future is None:
                    raise _takes_no_part(contributor, key, round_.futures)
                is_first = future.rows is None
                if is_first:
                    self._reserve(round_, size_of(rows))
            else:
                round_ = self._begin(now, contributor, key, size_of(rows))
                future, is_first = round_.futures[contributor.member], True
        except StatsdBNError as error:
            return [(peer, failure(error, key))]
        contributor.step, contributor.replicas = key.step, len(rows.counts)
        if is_first:
            future.since = now
            round_.behind, round_.latest = now - round_.latest, now
            contributor.late += now - round_.opened
            # What is sent again may come in a bunch, from one thread.
            if len(self._open) > contributor.threads and not contribution.attempt:
                self._count_threads(contributor)
        return self._put(now, round_, contributor, contribution, peer)

    def withdraw(self, contributor: Contributor) -> list[Reply]:
        """Wait no longer for a member, and end the rounds that waited for it alone."""
        for round_ in self:
            round_.withdraw(contributor.member)
        return self.complete()

    def complete(self) -> list[Reply]:
        """End the rounds that wait for nobody any more."""
        ready = [round_ for round_ in self if self._is_ready(round_)]
        return [reply for round_ in ready for reply in self._finish(round_)]

    def expire(self, now: float) -> list[Reply]:
        """End the rounds that are over their time."""
        if now < self._next_deadline:
            return []
        over = [round_ for round_ in self if now >= round_.opened + round_.seconds]
        self.answered = now if over else self.answered
        replies = [reply for round_ in over for reply in self._break(round_, self._timeout(now, round_))]
        self._next_deadline = min((round_.opened + round_.seconds for round_ in self), default=math.inf)
        return replies

    def settle(self, now: float, key: RoundKey) -> None:
        """Drop a round: its members have got one another's rows without the server, and nobody waits for it here.

        A contribution that is still under way must not begin it anew.
        """
        self._archive.remember(key)
        if round_ := self._open.pop(key, None):
            self.answered = now
            self._archive.room.keep(-round_.held)

    def fail(self, key: RoundKey, error: StatsdBNError) -> list[Reply]:
        """End a round with an error."""
        return self._break(self._open[key], error)

    def break_all(self, reason: Callable[[RoundKey], StatsdBNError]) -> list[Reply]:
        """End all rounds, each with its own error."""
        return [reply for round_ in list(self) for reply in self._break(round_, reason(round_.key))]

    def check_key(self, contributor: Contributor, key: RoundKey) -> None:
        """Raise ProtocolError if a member names a round of another group, or of another life of this one."""
        if key[:3] != self._run:
            job, group, epoch = self._run
            raise ProtocolError(
                f"round key: expected job {job!r}, group {group!r}, epoch {epoch}, as {contributor} registered, "
                f"got {key}"
            )

    def too_many(self, key: RoundKey) -> LimitExceeded:
        """Error of a member that opens one round too many."""
        most = self._budget.quota.max_open_rounds
        return self._budget.exceeded(
            f"group {key.group!r} of job {key.job!r} has {most} open rounds already", most, "open rounds"
        )

    def _begin(self, now: float, contributor: Contributor, key: RoundKey, size: int) -> Round:
        membership = self._membership
        if membership.state is GroupState.BROKEN:
            self.was_refused = True
            raise membership.why_broken
        self.check_key(contributor, key)
        if membership.state is not GroupState.OPEN:
            # It believes that the group is open, as it was in an earlier life of the server: it is to say so.
            raise unknown(contributor.session)
        if self._archive.remembers(key):
            raise failed(key, "it ended long ago, and its answer is no longer kept")
        if len(self._open) >= self._budget.quota.max_open_rounds:
            raise self.too_many(key)
        members = membership.participants(key.step)
        if contributor.member not in members:
            raise _takes_no_part(contributor, key, members)
        round_ = Round(key, members, now, contributor.deadline)
        self._reserve(round_, ROUND_BYTES + FUTURE_BYTES * len(members) + size)
        membership.reach(key.step)
        self._next_deadline = min(self._next_deadline, now + contributor.deadline)
        self._open[key] = round_
        return round_

    def _reserve(self, round_: Round, size: int) -> None:
        self._archive.room.take(size)
        round_.held += size

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
            return [(told, failure(conflict, round_.key)) for told in dict.fromkeys((earlier, peer)) if told]
        except RoundFailed as error:
            self.answered = now
            return self._break(round_, error, also=[peer])
        if self._is_ready(round_):
            return self._complete(now, round_, contributor)
        return [(peer, self._pending(now, round_))] if contribution.attempt else []

    def _complete(self, now: float, round_: Round, last: Contributor) -> list[Reply]:
        """End a round as its last rows come."""
        self.answered = now
        self.lengths.add(now - round_.opened)
        last.behind.add(round_.behind)
        self.lateness.add(round_.behind)
        if self._looks.are_due(now, round_.key):
            self._look(now, round_)
        return self._finish(round_)

    def _look(self, now: float, round_: Round) -> None:
        """Keep some rows for the figures of skew, if all members of a strict group have brought some."""
        membership, room = self._membership, self._archive.room
        # A lone member has nobody to differ from.
        if membership.is_elastic or not round_.is_complete or len(round_.futures) < max(2, membership.world_size):
            return
        before = self._looks.kept
        with suppress(LimitExceeded):  # then they are not kept
            room.check(MOST_LOOKS_BYTES + KNOWN_BYTES)
            self._looks.add(now, round_.key, [future.get() for future in round_.futures.values()])
            room.keep(self._looks.kept - before)

    def take_look(self, now: float) -> tuple[int, dict[str, FloatArray]] | None:
        """The step that was looked at, and the figures of its layers by name; None where nothing is due."""
        before = self._looks.kept
        found = self._looks.take(now)
        self._archive.room.keep(self._looks.kept - before)
        return found

    def _is_ready(self, round_: Round) -> bool:
        if round_.is_complete and self._membership.suffices:
            return True
        return bool(self._claims.of) and self._claims.are_due(round_)

    def _finish(self, round_: Round) -> list[Reply]:
        claimed = self._claims.take(round_) if self._claims.of else None
        self.done += 1
        aggregate = claimed or self._sum(round_)
        if aggregate.non_finite.runs:
            self.non_finite.take(aggregate, self._membership.contributors)
        round_.end(encode(aggregate))
        return self._close(round_)

    def _sum(self, round_: Round) -> Aggregate:
        """Sum of the rows."""
        total = reduce_round(round_)
        if self._claims.of:
            self._claims.check(total)
        return total

    def _break(self, round_: Round, error: StatsdBNError, also: Iterable[bytes] = ()) -> list[Reply]:
        self.failed += 1
        round_.fail(error)
        return self._close(round_, also)

    def _close(self, round_: Round, also: Iterable[bytes] = ()) -> list[Reply]:
        self._open.pop(round_.key, None)
        self._archive.add(round_, limits.KEPT_ROUNDS)
        for key in self._claims.round_ended() if self._claims.of else ():
            self._archive.remember(key)
        return [(peer, round_.answer) for peer in dict.fromkeys((*round_.peers, *also))]

    def _timeout(self, now: float, round_: Round) -> RoundTimeout:
        # Where too few are left, whoever has not come waits for newcomers as well.
        missing = round_.missing if self._membership.suffices else []
        return round_.timeout(
            self._late(round_), missing, late_table(now, round_, self._membership.contributors, missing)
        )

    def _late(self, round_: Round) -> str:
        """Whom a round waits for, in few words; a table has the rest."""
        are_several = self._membership.suffices and len(round_.missing) > 1
        return ranks_in_words(Members.of(round_.missing)) if are_several else self._awaited(round_)

    def _pending(self, now: float, round_: Round) -> bytes:
        """Frame that tells a member that asks again whom its round waits for."""
        seconds = int(now - round_.opened)
        text = f"has waited {seconds} s for {self._awaited(round_)}"
        return pending(round_.key, seconds, text, self._where(round_, now))

    def _awaited(self, round_: Round) -> str:
        """Whom a round waits for, in words."""
        membership = self._membership
        if not membership.suffices:
            return f"enough ranks ({len(membership.contributors)} of min_members {membership.min_members} are there)"
        late = ", ".join(str(membership.contributors[member]) for member in round_.missing[:TOLD_OF])
        return f"{late} and {len(round_.missing) - TOLD_OF} more" if len(round_.missing) > TOLD_OF else late

    def _where(self, round_: Round, now: float) -> str:
        """Where the late members are, as far as they have answered; one sentence each, since `_awaited` names them."""
        if not self._membership.suffices:
            return ""
        late = (self._membership.contributors[member] for member in round_.missing)
        # Most have answered nothing: a few are asked.
        seen = islice(((contributor, where) for contributor in late if (where := contributor.where(now))), TOLD_OF)
        return "; ".join(f"rank {contributor.member} {where}" for contributor, where in seen)


def _takes_no_part(contributor: Contributor, key: RoundKey, members: Iterable[int]) -> RoundFailed:
    return failed(key, f"{contributor} is not one of the ranks that take part, {Members.of(members)}")


def pending(key: RoundKey, seconds: int, text: str, where: str = "") -> bytes:
    """Frame that tells a member why it waits, and since when."""
    return encode(Pending(key, seconds, told(f"{key}: {text}"), told(where)))


Deferred = tuple[Contributor, Contribution, bytes]
"""A contribution, whose it is, and the peer that sent it."""


class Deferral:
    """Contributions that wait, one for each member and round, in the order of their arrival.

    Args:
        room: what they take is taken from.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._waiting: dict[tuple[int, RoundKey], Deferred] = {}
        self._counts: Counter[int] = Counter()

    @property
    def members(self) -> set[int]:
        """Members whose contributions wait."""
        return set(self._counts)

    def would_exceed(self, most: int, contributor: Contributor, key: RoundKey) -> bool:
        """Whether accepting this would exceed the member's limit, `most` contributions."""
        return self._counts[contributor.member] >= most and (contributor.member, key) not in self._waiting

    def add(self, contributor: Contributor, contribution: Contribution, peer: bytes) -> None:
        """Keep a contribution; if it was sent again, remember the new peer.

        Raises:
            LimitExceeded: the job would keep too many bytes.
            ContributionConflict: the member has sent other rows before; these count.
        """
        key = contribution.key
        if earlier := self._waiting.get((contributor.member, key)):
            if not same(earlier[1].rows, contribution.rows):
                raise conflict(key, contributor.member)
        else:
            size = size_of(contribution.rows)
            self._room.take(size)
            self._counts[contributor.member] += 1
        self._waiting[contributor.member, key] = contributor, contribution, peer

    def take(self) -> list[Deferred]:
        """Take all contributions out, in order."""
        taken = list(self._waiting.values())
        self._waiting.clear()
        self._counts.clear()
        self._room.keep(-sum(size_of(contribution.rows) for _, contribution, _ in taken))
        return taken

    def forget(self, gone: Contributor) -> None:
        """Drop the contributions of a member."""
        self._drop([case for case, (contributor, _, _) in self._waiting.items() if contributor is gone])

    def forget_round(self, key: RoundKey) -> None:
        """Drop the contributions to a round."""
        self._drop([case for case in self._waiting if case[1] == key])

    def _drop(self, cases: list[tuple[int, RoundKey]]) -> None:
        for case in cases:
            _, contribution, _ = self._waiting.pop(case)
            self._room.keep(-size_of(contribution.rows))
            self._counts[case[0]] -= 1
            if not self._counts[case[0]]:
                del self._counts[case[0]]
