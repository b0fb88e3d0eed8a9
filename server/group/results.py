"""Results: how a round's rows are reduced, and the answers of ended rounds that a group keeps.

Members in step can be a round apart, so the latest answers are kept for whoever asks again. A round that failed did not
wait for all, so a member may come to it many rounds later and must still hear why; rounds that succeed do not push such
an answer out. Of those before the latest a number each is enough: a late copy of a contribution must not begin such a
round anew.

Claims are what members that come back to a restarted server say that its earlier life had given them. A member may wait
still for the answer to a round that another one was given, and all must get the same bytes. So a claim ends its round,
whichever member brings it. If the server has the rows of all members that the claim covers again, the round ends with
their sum. The ranks of a job trust one another, so nobody votes on a claim; but two claims that contradict each other
break the group.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from server.group.contributor import Contributor
from server.group.rounds import Round, State
from server.security.quota import CONTRIBUTION_BYTES, RUN_BYTES, Room
from statsd_bn import limits
from statsd_bn.errors import ContributionConflict
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import Aggregate, sound_aggregate
from statsd_bn.reduction import FloatArray, bearers, is_finite, join_in_order, sum_in_order
from statsd_bn.round_key import GATHER, RoundKey

# A copy can be late by what a broken connection had under way, which is far less than this.
REMEMBERED_ROUNDS = 1024


class Archive:
    """The rounds that have ended.

    Args:
        room: what they take is taken from.

    Attributes:
        room: as given.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self._reduced: dict[RoundKey, Round] = {}
        self._failed: dict[RoundKey, Round] = {}
        self._remembered: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._reduced) + len(self._failed)

    def get(self, key: RoundKey) -> Round | None:
        """Round whose answer is kept; None if it is not."""
        return self._reduced.get(key) or (self._failed.get(key) if self._failed else None)

    def remembers(self, key: RoundKey) -> bool:
        """Whether a round has ended and its answer is no longer kept."""
        return hash(key) in self._remembered

    def add(self, round_: Round, most: int) -> None:
        """Keep a round that has ended, and drop the oldest of those that ended in the same way beyond `most`."""
        kept = self._failed if round_.state is State.FAILED else self._reduced
        kept[round_.key] = round_
        change = len(round_.answer)
        round_.held += change
        while len(kept) > most:
            oldest = next(iter(kept))
            change -= kept.pop(oldest).held
            self.remember(oldest)
        self.room.keep(change)

    def remember(self, key: RoundKey) -> None:
        """Remember that a round has ended whose answer is not kept."""
        self._remembered[hash(key)] = None
        if len(self._remembered) > REMEMBERED_ROUNDS:
            del self._remembered[next(iter(self._remembered))]


logger = logging.getLogger("statsd_bn.server")


@dataclass(frozen=True, slots=True)
class Claim:
    """An aggregate, and the first member that says it was given it."""

    aggregate: Aggregate
    author: Contributor

    @property
    def size(self) -> int:
        """Number of bytes that it takes."""
        return self.aggregate.values.nbytes + CONTRIBUTION_BYTES + RUN_BYTES * len(self.aggregate.non_finite.runs)


class Claims:
    """The claims of a group's members, by round.

    Args:
        room: what they take is taken from.

    Attributes:
        count: whether they may end rounds by now.
        of: the claims, by round.
    """

    def __init__(self, room: Room) -> None:
        self.count = False
        self._room = room
        self.of: dict[RoundKey, Claim] = {}
        self._different: Claim | None = None
        self._rounds_left = limits.KEPT_ROUNDS

    def add(self, contributor: Contributor, aggregate: Aggregate) -> None:
        """Record an aggregate that a member says it was given.

        Raises:
            LimitExceeded: the job would keep too many bytes.
        """
        claim, known = Claim(aggregate, contributor), self.of.get(aggregate.key)
        if known is None:
            self._room.take(claim.size)
            self.of[aggregate.key] = claim
        elif not is_same(known.aggregate, aggregate):
            self._different = self._different or claim

    def are_due(self, round_: Round) -> bool:
        """Whether a claim ends a round now."""
        return self.count and round_.key in self.of

    def take(self, round_: Round) -> Aggregate | None:
        """Aggregate that ends a round, taken from its claim; None if the sum of its rows ends it."""
        claim = self.of.get(round_.key)
        # A member that the server had gone on without may have contributed; the others' answer stays what it was.
        if claim is None or (round_.is_complete and set(round_.futures) == set(claim.aggregate.members)):
            return None
        self._forget(round_.key)
        return claim.aggregate

    def check(self, total: Aggregate) -> None:
        """Drop the claim of a round that was summed, and warn if it differs from the sum."""
        claim = self._forget(total.key)
        if claim and not is_same(claim.aggregate, total):
            logger.warning(
                "%s: %s came back with another aggregate than the sum of all rows; it is ignored",
                total.key,
                claim.author,
            )

    def contradiction(self) -> ContributionConflict | None:
        """Error of two answers that cannot be of one group: the group was begun twice.

        Members of both beginnings are here, and nobody can say whose rows an answer has.
        """
        of_another = self._different or self._of_other_members()
        if of_another is None:
            return None
        key, author = of_another.aggregate.key, of_another.author
        text = f"{key}: {author} was given another aggregate than others were, before the server was restarted"
        return ContributionConflict(text, **key.fields, member=author.member)

    def _of_other_members(self) -> Claim | None:
        """A claim that covers a member which another one of the same step does not, though that one covers no fewer.

        Members may be lost within a step, but nobody joins one.
        """
        steps: dict[int, list[Claim]] = {}
        for key, claim in self.of.items():
            if key.phase != GATHER:
                steps.setdefault(key.step, []).append(claim)
        for claims in steps.values():
            most_first = sorted(claims, key=lambda claim: len(claim.aggregate.members), reverse=True)
            for more, fewer in pairwise(most_first):
                if not set(more.aggregate.members).issuperset(fewer.aggregate.members):
                    return fewer
        return None

    def round_ended(self) -> list[RoundKey]:
        """Count a round that has ended; returns the rounds whose claims are dropped, since nobody can wait for them."""
        self._rounds_left -= 1
        if self._rounds_left > 0:
            return []
        forgotten = list(self.of)
        for key in forgotten:
            self._forget(key)
        return forgotten

    def _forget(self, key: RoundKey) -> Claim | None:
        claim = self.of.pop(key, None)
        if claim:
            self._room.keep(-claim.size)
        return claim


def is_same(one: Aggregate, other: Aggregate) -> bool:
    """Whether two aggregates are equal to the last bit."""
    return (
        (one.key, one.replicas, one.count) == (other.key, other.replicas, other.count)
        and (one.members, one.non_finite) == (other.members, other.non_finite)
        and one.values.shape == other.values.shape
        and one.values.tobytes() == other.values.tobytes()
    )


def reduce_round(round_: Round) -> Aggregate:
    """Reduces one complete round: adds all rows in replica order, or joins them in that order if it is a gather.

    Raises:
        LookupError: a contribution is missing.
    """
    rows = round_.rows()
    members = Members.of(round_.futures)
    if round_.key.phase == GATHER:
        return Aggregate(round_.key, len(rows), round_.count, members, join_in_order(rows))
    total = sum_in_order(rows) if len(rows) > 1 else rows[0]
    # Mostly nobody's, so no pairs are made before that is known.
    whose = NOBODY if is_finite(total) else bearers(_by_member(round_))
    return sound_aggregate(round_.key, len(rows), round_.count, members, total, whose)


def _by_member(round_: Round) -> Iterator[tuple[int, FloatArray]]:
    return ((member, future.get().values) for member, future in round_.futures.items())
