"""First non-finite: the origin of a group's first NaN or infinity, forward and backward, for log and status.

A GradScaler scales gradients until they overflow, and skips such a step. So non-finite gradients are reported only if
the forward pass, the end of the group or a long series of steps shows that they are no such overflow.
"""

import logging
from collections.abc import Mapping
from itertools import islice

from server.group.contributor import Contributor
from statsd_bn.members import MAX_NAMED_RANKS, Members, format_ranks
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import find_non_finite
from statsd_bn.round_key import RoundKey, format_first_non_finite

logger = logging.getLogger("statsd_bn.server")

# A longer series of steps with non-finite gradients has another cause: a GradScaler starts at 2^16 and halves its scale
# after each.
MAX_OVERFLOWS = 20

# Characters of a text: a report contains all of them.
MAX_TEXT_LENGTH = 1024


class FirstNonFinite:
    """The first non-finite rounds of one epoch of a group."""

    def __init__(self) -> None:
        self._texts: dict[bool, str] = {}
        # The latest step with non-finite gradients, and the length of the series.
        self._step, self._in_a_row = -1, 0

    def report(self, step: int, *, is_broken: bool) -> list[str]:
        """Texts for the report, in order; empty for overflows without an effect."""
        has_ended_it = is_broken and step <= self._step + 1
        is_finding = True in self._texts or has_ended_it or self._in_a_row > MAX_OVERFLOWS
        return list(self._texts.values()) if is_finding else []

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
