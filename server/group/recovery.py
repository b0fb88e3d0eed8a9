"""Recovery of a group after a restart of the server, which stores nothing on disk.

A member that reconnects names the members that it last knew of, and the group waits for all of them. Meanwhile their
contributions are parked. A member may wait for an answer that another one already has, and all must get the same bytes:
so the members resend their latest results, and such a result ends its round.
"""

import logging
from dataclasses import dataclass
from itertools import pairwise

from server.group.contributor import Contributor
from server.group.rounds import Round, conflict_error, is_same_rows
from server.security.quota import CONTRIBUTION_BYTES, RUN_BYTES, MemoryShare, size_of
from statsd_bn import limits
from statsd_bn.errors import ContributionConflict
from statsd_bn.messages import Aggregate, Contribution
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.server")

# How long an unreachable member may take to reconnect: ZeroMQ reconnects within 0.1 s, and the client then sends at
# once. A longer time would delay the report of a killed process, which should take less than a second.
RECONNECT_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class RecoveredResult:
    """An aggregate from before a server restart, and the first member that resent it."""

    aggregate: Aggregate
    source: Contributor

    @property
    def size(self) -> int:
        """Size in bytes."""
        aggregate = self.aggregate
        runs = len(aggregate.members.runs) + len(aggregate.non_finite.runs)
        return aggregate.values.nbytes + CONTRIBUTION_BYTES + RUN_BYTES * runs


class RecoveredResults:
    """Results from before a server restart.

    If the server has the rows of all members that a result covers, the round ends with the sum of these rows instead.
    The ranks of a job trust each other, so there is no vote on a result, but two contradictory results break the group.
    """

    def __init__(self) -> None:
        self.enabled = False  # True after all members have reconnected: results may end rounds
        self.results: dict[RoundKey, RecoveredResult] = {}
        self.size = 0  # in bytes
        self._different: RecoveredResult | None = None
        self._rounds_left = limits.CACHED_ROUNDS

    def add(self, contributor: Contributor, aggregate: Aggregate) -> None:
        """Add an aggregate that a member resends."""
        result = RecoveredResult(aggregate, contributor)
        known = self.results.setdefault(aggregate.key, result)
        if known is result:
            self.size += result.size
        elif encode(known.aggregate) != encode(aggregate):
            self._different = self._different or result
        contributor.recovered.add(known.aggregate.key)

    def is_left_out(self, member: int, since: int) -> bool:
        """Whether any result of step `since` or later lacks a member."""
        return any(since <= key.step and member not in one.aggregate.members for key, one in self.results.items())

    def can_finish(self, key: RoundKey) -> bool:
        """Whether a result ends a round now."""
        return self.enabled and key in self.results

    def consume(self, round_: Round) -> Aggregate | None:
        """Remove and return the result that ends a round; None if the sum of its rows ends it."""
        result = self.results.get(round_.key)
        # Even if the round has rows of a member that the result lacks, the result counts: members have received it.
        if result is None or (not round_.nr_missing and set(round_.futures) == set(result.aggregate.members)):
            return None
        self._drop(round_.key)
        return result.aggregate

    def verify(self, total: Aggregate) -> None:
        """Drop the result of a round that was summed, and warn if it differs from the sum."""
        result = self._drop(total.key)
        if result and encode(result.aggregate) != encode(total):
            text = "%s: %s resent an aggregate that differs from the sum of all rows; ignored"
            logger.warning(text, total.key, result.source)

    def contradiction(self) -> ContributionConflict | None:
        """Error if two results contradict each other: members of two runs of the group may have registered."""
        of_another = self._different or self._find_inconsistent()
        if of_another is None:
            return None
        key, source = of_another.aggregate.key, of_another.source
        text = f"{key}: {source} received another aggregate than other ranks before the server was restarted"
        return ContributionConflict(text, **key.fields, member=source.member)

    def _find_inconsistent(self) -> RecoveredResult | None:
        """A result with a member that is missing from a larger or equally large result of the same step."""
        # Within a step members may be lost, but none joins.
        results = [result for key, result in self.results.items() if key.phase != GATHER]
        results.sort(key=lambda result: (result.aggregate.key.step, -len(result.aggregate.members)))
        for more, fewer in pairwise(results):
            is_same_step = more.aggregate.key.step == fewer.aggregate.key.step
            if is_same_step and not set(more.aggregate.members).issuperset(fewer.aggregate.members):
                return fewer
        return None

    def round_ended(self) -> list[RoundKey]:
        """Count an ended round; returns the rounds of dropped results, for which no member can wait any longer."""
        if not self.results:
            return []
        self._rounds_left -= 1
        if self._rounds_left > 0:
            return []
        return [key for key in list(self.results) if self._drop(key)]

    def _drop(self, key: RoundKey) -> RecoveredResult | None:
        result = self.results.pop(key, None)
        if result:
            self.size -= result.size
        return result


ParkedContribution = tuple[Contributor, Contribution, bytes]  # with the peer that sent it


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
        """Whether a member already has as many parked contributions as allowed, none of them to this round."""
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
