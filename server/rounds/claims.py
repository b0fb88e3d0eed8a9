"""Claims: what members that come back to a restarted server say that its earlier life had given them.

A member may wait still for the answer to a round that another one was given, and all must get the same bytes. So a
claim ends its round, but only where it must be believed:

- Where the server can tell its own aggregates by their seals, only these count. One is enough: whatever member brings
  it, the server has made it. A round for which it has all the rows again is summed all the same.
- Where it cannot, because its key is new, a claim counts as much as its author's rows would. All rows that it covers
  are there: they are summed, and a claim that says anything else is dropped. Some are missing: all members that the
  round still waits for must have claimed the same. If they contradict one another, or leave out a member that has
  contributed, nobody can say who is right, and the group breaks.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from server.limits.account import CONTRIBUTION_BYTES, RUN_BYTES
from server.membership.contributor import Contributor
from server.rounds.results import Room
from server.rounds.rounds import Round
from statsd_bn import limits
from statsd_bn.errors import ContributionConflict
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import GATHER, RoundKey

logger = logging.getLogger("statsd_bn.server")


@dataclass(slots=True)
class Claim:
    """An aggregate, the first member that says it was given it, and the numbers of all that do."""

    aggregate: Aggregate
    first: Contributor
    authors: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Number of bytes that it takes."""
        return self.aggregate.values.nbytes + CONTRIBUTION_BYTES + RUN_BYTES * len(self.aggregate.non_finite.runs)


class Claims:
    """The claims of a group's members, by round.

    Args:
        room: what they take is taken from.
        are_genuine: whether only aggregates come here that bear the server's own seal.

    Attributes:
        count: whether they may end rounds by now.
        of: the claims, by round.
    """

    def __init__(self, room: Room, *, are_genuine: bool) -> None:
        self.count = False
        self._room = room
        self._are_genuine = are_genuine
        self.of: dict[RoundKey, list[Claim]] = {}
        self._rounds_left = limits.KEPT_ROUNDS

    def add(self, contributor: Contributor, aggregate: Aggregate) -> None:
        """Record an aggregate that a member says it was given.

        Raises:
            LimitExceeded: the job would keep too many bytes.
        """
        claims = self.of.get(aggregate.key, [])
        claim = next((one for one in claims if is_same(one.aggregate, aggregate)), None)
        if claim is None:
            claim = Claim(aggregate, contributor)
            self._room.take(claim.size)
            self.of.setdefault(aggregate.key, []).append(claim)
        claim.authors.add(contributor.member)

    def are_due(self, round_: Round) -> bool:
        """Whether all members that a round still waits for claim to have its answer."""
        claims = self.of.get(round_.key) if self.count else None
        if not claims:
            return False
        return self._are_genuine or set().union(*(claim.authors for claim in claims)).issuperset(round_.missing)

    def take(self, round_: Round) -> Aggregate | None:
        """Aggregate that ends a complete round, taken from its claims; None if the sum of its rows ends it.

        Raises:
            ContributionConflict: the claims contradict one another, or leave out a member that has contributed.
        """
        claims = self.of.get(round_.key)
        if not claims or self._are_there(round_, claims):
            return None
        self._forget(round_.key)
        if len(claims) > 1:
            raise conflict(claims[1])
        if not self._are_genuine and (left_out := set(round_.waiting).difference(claims[0].aggregate.members)):
            raise contradiction(claims[0], left_out)
        return claims[0].aggregate

    def check(self, total: Aggregate) -> None:
        """Drop the claims of a round that was summed, and warn of those that differ from the sum."""
        for claim in self._forget(total.key):
            if not is_same(claim.aggregate, total):
                logger.warning(
                    "%s: ranks %s came back with another aggregate than the sum of all rows; it is ignored",
                    total.key,
                    sorted(claim.authors),
                )

    def proven_contradiction(self) -> ContributionConflict | None:
        """Error of two answers that are both the server's own, and cannot be of one group: the group was begun twice.

        Members of both beginnings are here, and nobody can say whose rows an answer has.
        """
        if not self._are_genuine:
            return None
        different = (claims[1] for claims in self.of.values() if len(claims) > 1)
        of_another = next(different, None) or self._of_other_members()
        return None if of_another is None else conflict(of_another)

    def _of_other_members(self) -> Claim | None:
        """A claim that covers a member which another one of the same step does not, though that one covers no fewer.

        Members may be lost within a step, but nobody joins one.
        """
        steps: dict[int, dict[Members, Claim]] = {}
        for key, claims in self.of.items():
            if key.phase != GATHER:
                steps.setdefault(key.step, {})[claims[0].aggregate.members] = claims[0]
        for claims_of in steps.values():
            most_first = sorted(claims_of, key=len, reverse=True)
            for more, fewer in pairwise(most_first):
                if not set(more).issuperset(fewer):
                    return claims_of[fewer]
        return None

    def contradictions(self, open_rounds: Collection[Round]) -> list[ContributionConflict]:
        """Errors of the rounds whose claims differ, where the rows cannot decide."""
        waiting = {round_.key: set(round_.waiting) for round_ in open_rounds}
        return [
            conflict(claims[1])
            for key, claims in self.of.items()
            if len(claims) > 1 and not all(claim.authors <= waiting.get(key, set()) for claim in claims)
        ]

    def round_ended(self) -> list[RoundKey]:
        """Count a round that has ended; returns the rounds whose claims are dropped, since nobody can wait for them."""
        self._rounds_left -= 1
        if self._rounds_left > 0:
            return []
        forgotten = list(self.of)
        for key in forgotten:
            self._forget(key)
        return forgotten

    def _are_there(self, round_: Round, claims: list[Claim]) -> bool:
        """Whether the rows of all members that the claims cover have come."""
        if not round_.is_complete:
            return False
        there = set(round_.futures)
        if self._are_genuine:
            # A member that the server had gone on without may have contributed; the others' answer stays what it was.
            return all(there == set(claim.aggregate.members) for claim in claims)
        return all(there.issuperset(claim.aggregate.members) for claim in claims)

    def _forget(self, key: RoundKey) -> list[Claim]:
        claims = self.of.pop(key, [])
        self._room.keep(-sum(claim.size for claim in claims))
        return claims


def is_same(one: Aggregate, other: Aggregate) -> bool:
    """Whether two aggregates are equal to the last bit; their seals may differ."""
    return (
        (one.key, one.replicas, one.count) == (other.key, other.replicas, other.count)
        and (one.members, one.non_finite) == (other.members, other.non_finite)
        and one.values.shape == other.values.shape
        and one.values.tobytes() == other.values.tobytes()
    )


def conflict(claim: Claim) -> ContributionConflict:
    """Error of members that were given different answers to one round."""
    return _error(claim, "was given another aggregate than others were, before the server was restarted")


def contradiction(claim: Claim, left_out: Collection[int]) -> ContributionConflict:
    """Error of a claim that leaves out members that have contributed."""
    return _error(claim, f"was given an aggregate without ranks {Members.of(left_out)}, and not all others were")


def _error(claim: Claim, text: str) -> ContributionConflict:
    key = claim.aggregate.key
    return ContributionConflict(f"{key}: {claim.first} {text}", **key.fields, member=claim.first.member)
