"""Claims: what members that come back to a restarted server say that its earlier life had given them.

A member may wait still for the answer to a round that another one was given, and all must get the same bytes. So a
claim ends its round, whichever member brings it. If the server has the rows of all members that the claim covers again,
the round ends with their sum. The ranks of a job trust one another, so nobody votes on a claim; but two claims that
contradict each other break the group.
"""

import logging
from dataclasses import dataclass
from itertools import pairwise

from server.limits.quota import CONTRIBUTION_BYTES, RUN_BYTES, Room
from server.membership.contributor import Contributor
from server.rounds.rounds import Round
from statsd_bn import limits
from statsd_bn.errors import ContributionConflict
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import GATHER, RoundKey

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
