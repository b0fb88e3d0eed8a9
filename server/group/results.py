"""Results: reduces rounds, archives their answers, and recovers results after a server restart.

Members in step can be one round apart, so the latest answers are archived for repeated contributions. After a server
restart a member may wait for an answer that another member already has, and all must get the same bytes: so the members
resend their latest results, and such a result ends its round.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from server.group.contributor import Contributor
from server.group.rounds import Round, RoundState
from server.security.quota import CONTRIBUTION_BYTES, RUN_BYTES, MemoryShare
from statsd_bn import limits
from statsd_bn.errors import ContributionConflict
from statsd_bn.members import MAX_NAMED_RANKS, NO_MEMBERS, Members, format_ranks
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import find_non_finite, is_finite, join_in_order, non_finite_members, sum_in_order
from statsd_bn.round_key import FORWARD, GATHER, RoundKey, format_first_non_finite

# A late copy of a contribution is at most as old as the data in flight on a broken connection, far less than this.
REMEMBERED_ROUNDS = 1024


class Archive:
    """Ended rounds with their answers; older rounds leave only a hash.

    A failed round did not wait for all members, and a member may reach it many rounds later and must still get the
    error, so successful rounds do not evict failed ones.
    """

    def __init__(self, memory: MemoryShare) -> None:
        self.memory = memory
        self._reduced: dict[RoundKey, Round] = {}
        self._failed: dict[RoundKey, Round] = {}
        self._ended: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._reduced) + len(self._failed)

    def get(self, key: RoundKey) -> Round | None:
        """The ended round of a key; None if it is not archived."""
        return self._reduced.get(key) or (self._failed.get(key) if self._failed else None)

    def has_ended(self, key: RoundKey) -> bool:
        """Whether a round has ended and left the archive."""
        return hash(key) in self._ended

    def add(self, round_: Round) -> None:
        """Archive a round, and evict the oldest with the same outcome if there are too many."""
        kept = self._failed if round_.state is RoundState.FAILED else self._reduced
        kept[round_.key] = round_
        change = len(round_.answer)
        round_.allocated += change
        if len(kept) > limits.CACHED_ROUNDS:
            oldest = next(iter(kept))
            change -= kept.pop(oldest).allocated
            self.add_ended(oldest)
        self.memory.adjust(change)

    def add_ended(self, key: RoundKey) -> None:
        """Record the end of a round without archiving its answer."""
        self._ended[hash(key)] = None
        if len(self._ended) > REMEMBERED_ROUNDS:
            del self._ended[next(iter(self._ended))]


logger = logging.getLogger("statsd_bn.server")


@dataclass(frozen=True, slots=True)
class RecoveredResult:
    """An aggregate from before a server restart, and the first member that resent it."""

    aggregate: Aggregate
    source: Contributor

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.aggregate.values.nbytes + CONTRIBUTION_BYTES + RUN_BYTES * len(self.aggregate.non_finite.runs)


class RecoveredResults:
    """Results from before a server restart.

    If the server has the rows of all members that a result covers, the round ends with their sum instead. The ranks of
    a job trust each other, so there is no vote on a result, but two contradictory results break the group.
    """

    def __init__(self, memory: MemoryShare) -> None:
        self.enabled = False  # results may end rounds, after all members have reconnected
        self._memory = memory
        self.results: dict[RoundKey, RecoveredResult] = {}
        self._different: RecoveredResult | None = None
        self._rounds_left = limits.CACHED_ROUNDS

    def add(self, contributor: Contributor, aggregate: Aggregate) -> None:
        """Add an aggregate that a member resends; raises LimitExceeded."""
        result, known = RecoveredResult(aggregate, contributor), self.results.get(aggregate.key)
        if known is None:
            self._memory.allocate(result.size)
            self.results[aggregate.key] = result
        elif not is_same_aggregate(known.aggregate, aggregate):
            self._different = self._different or result

    def can_finish(self, round_: Round) -> bool:
        """Whether a result ends a round now."""
        return self.enabled and round_.key in self.results

    def consume(self, round_: Round) -> Aggregate | None:
        """Remove and return the result that ends a round; None if the sum of its rows ends it."""
        result = self.results.get(round_.key)
        # The round may have rows of a member that the result does not cover; the former answer stays valid.
        if result is None or (round_.is_complete and set(round_.futures) == set(result.aggregate.members)):
            return None
        self._drop(round_.key)
        return result.aggregate

    def verify(self, total: Aggregate) -> None:
        """Drop the result of a round that was summed, and warn if it differs from the sum."""
        result = self._drop(total.key)
        if result and not is_same_aggregate(result.aggregate, total):
            logger.warning(
                "%s: %s resent an aggregate that differs from the sum of all rows; ignored", total.key, result.source
            )

    def contradiction(self) -> ContributionConflict | None:
        """Error of two results that cannot belong to one group: it was started twice, with members of both present."""
        of_another = self._different or self._find_inconsistent()
        if of_another is None:
            return None
        key, source = of_another.aggregate.key, of_another.source
        text = f"{key}: {source} received another aggregate than other ranks before the server was restarted"
        return ContributionConflict(text, **key.fields, member=source.member)

    def _find_inconsistent(self) -> RecoveredResult | None:
        """A result that covers a member which another one of the same step does not, though that one covers no fewer.

        Members may be lost within a step, but none joins within one.
        """
        results = [result for key, result in self.results.items() if key.phase != GATHER]
        results.sort(key=lambda result: (result.aggregate.key.step, -len(result.aggregate.members)))
        for more, fewer in pairwise(results):
            is_same_step = more.aggregate.key.step == fewer.aggregate.key.step
            if is_same_step and not set(more.aggregate.members).issuperset(fewer.aggregate.members):
                return fewer
        return None

    def round_ended(self) -> list[RoundKey]:
        """Count an ended round; returns the rounds of dropped results, for which no member can wait any longer."""
        self._rounds_left -= 1
        if self._rounds_left > 0:
            return []
        return [key for key in list(self.results) if self._drop(key)]

    def _drop(self, key: RoundKey) -> RecoveredResult | None:
        result = self.results.pop(key, None)
        if result:
            self._memory.adjust(-result.size)
        return result


def is_same_aggregate(one: Aggregate, other: Aggregate) -> bool:
    """Whether two aggregates are equal to the last bit."""
    return (
        (one.key, one.replicas, one.count) == (other.key, other.replicas, other.count)
        and (one.members, one.non_finite) == (other.members, other.non_finite)
        and one.values.shape == other.values.shape
        and one.values.tobytes() == other.values.tobytes()
    )


def reduce_round(round_: Round) -> Aggregate:
    """Reduces one complete round: adds all rows in replica order, or joins them in that order for a gather.

    Raises:
        LookupError: a contribution is missing.
    """
    rows = round_.rows()
    members = Members.of(round_.futures)
    if round_.key.phase == GATHER:
        return Aggregate(round_.key, len(rows), round_.count, members, join_in_order(rows))
    total, whose = sum_in_order(rows) if len(rows) > 1 else rows[0], NO_MEMBERS
    if not is_finite(total):
        whose = non_finite_members((member, future.get().values) for member, future in round_.futures.items())
    return Aggregate.unchecked(round_.key, len(rows), round_.count, members, total, whose)


# A longer series of steps with non-finite gradients has another cause: a GradScaler starts at 2^16 and halves its scale
# after each.
MAX_OVERFLOWS = 20

# The text of `NonFiniteChannels`, which members send; numbers of at most seven digits.
_CHANNELS = re.compile(r"(\d{1,7}) of (\d{1,7}) channels \(([a-zA-Z ]{1,16})\)")

# Characters of a text: a report contains all of them.
MAX_TEXT_LENGTH = 1024


class FirstNonFinite:
    """The origin of a group's first NaN or infinity in one epoch, forward and backward, for log and status.

    A GradScaler scales gradients until they overflow, and skips such a step. So non-finite gradients are reported only
    if the forward pass, the end of the group or a long series of steps shows that they are no such overflow.
    """

    def __init__(self) -> None:
        self._texts: dict[bool, str] = {}
        self._entries: dict[bool, dict[str, Any]] = {}
        # The latest step with non-finite gradients, and the length of the series.
        self._step, self._in_a_row = -1, 0

    def report(self, step: int, is_broken: bool) -> list[str]:
        """Texts for the report, in order; empty for overflows without an effect."""
        return list(self._texts.values()) if self._is_finding(step, is_broken) else []

    def first(self, step: int, is_broken: bool) -> dict[str, Any] | None:
        """The first text's facts for the report; None if `report` is empty."""
        return next(iter(self._entries.values()), None) if self._is_finding(step, is_broken) else None

    def _is_finding(self, step: int, is_broken: bool) -> bool:
        has_ended_it = is_broken and step <= self._step + 1
        return True in self._texts or has_ended_it or self._in_a_row > MAX_OVERFLOWS

    def record(self, aggregate: Aggregate, contributors: Mapping[int, Contributor]) -> None:
        """Record a non-finite aggregate; only the first in each direction is kept."""
        self.record_round(aggregate.key, aggregate.non_finite, str(find_non_finite(aggregate.values)), contributors)

    def record_round(self, key: RoundKey, bearers: Members, what: str, contributors: Mapping[int, Contributor]) -> None:
        """Record a non-finite round that a member reported."""
        is_forward = key.is_forward
        if not is_forward:
            self._count(key.step)
        if is_forward in self._texts:
            return
        there = (contributors[member] for member in islice(bearers, MAX_NAMED_RANKS) if member in contributors)
        who = format_ranks(bearers, {contributor.member: contributor.place for contributor in there})
        text = format_first_non_finite(key, who, what)
        self._texts[is_forward] = text = text[:MAX_TEXT_LENGTH]
        number, channels, kinds = counted.groups() if (counted := _CHANNELS.match(what)) else (0, 0, "")
        self._entries[is_forward] = {
            "layer": key.layer,
            "phase": FORWARD if is_forward else key.phase,
            "step": key.step,
            "ranks": list(islice(bearers, MAX_NAMED_RANKS)),
            **({"ranks_left_out": more} if (more := len(bearers) - MAX_NAMED_RANKS) > 0 else {}),
            "channels": int(number),
            "of": int(channels),
            "what": kinds,
        }
        if is_forward:
            # Non-finite gradients before this were no overflow.
            for found in self._texts.values():
                logger.warning("job %r, group %r: %s", key.job, key.group, found)
        else:
            logger.info("job %r, group %r: %s", key.job, key.group, text)

    def _count(self, step: int) -> None:
        """Count consecutive steps; a step has many rounds."""
        if step != self._step:
            self._in_a_row = self._in_a_row + 1 if step == self._step + 1 else 1
            self._step = step
