"""First non-finite: whose NaN or infinity came first to a group, forward and backward, for its log and status.

Gradients may be infinite on purpose: a GradScaler scales them until they are, and leaves out such a step. So they are
told of only where something has come of it, or they stay so.
"""

import logging
from collections.abc import Mapping
from itertools import islice

from server.group.contributor import Contributor
from statsd_bn.members import TOLD_OF, Members, ranks_in_words
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import not_finite
from statsd_bn.round_key import RoundKey, first_non_finite

logger = logging.getLogger("statsd_bn.server")

# So many steps in a row whose gradients are not finite have another reason: a GradScaler halves its scale after each,
# and begins with 2^16.
MOST_OVERFLOWS = 20

# Letters of a text, since a report has them all.
MOST_TEXT = 1024


class FirstNonFinite:
    """What is remembered of one life of a group."""

    def __init__(self) -> None:
        self._texts: dict[bool, str] = {}
        # The latest step with gradients that are not finite, and how many there were in a row.
        self._step, self._in_a_row = -1, 0

    def told(self, step: int, *, is_broken: bool) -> list[str]:
        """What to say of them, the first one first; none where nothing has come of it.

        Args:
            step: the latest that a member is in.
            is_broken: whether the group is.
        """
        has_ended_it = is_broken and step <= self._step + 1
        is_finding = True in self._texts or has_ended_it or self._in_a_row > MOST_OVERFLOWS
        return list(self._texts.values()) if is_finding else []

    def take(self, aggregate: Aggregate, contributors: Mapping[int, Contributor]) -> None:
        """Note an aggregate that is not finite; only the first in each direction counts."""
        self.note(aggregate.key, aggregate.non_finite, str(not_finite(aggregate.values)), contributors)

    def note(self, key: RoundKey, bearers: Members, what: str, contributors: Mapping[int, Contributor]) -> None:
        """Likewise, where a member has told of it.

        Args:
            key: of the round.
            bearers: who brought what is not finite.
            what: how many channels were not, in words.
            contributors: of the group, by number.
        """
        is_forward = key.is_forward
        if not is_forward:
            self._count(key.step)
        if is_forward in self._texts:
            return
        there = (contributors[member] for member in islice(bearers, TOLD_OF) if member in contributors)
        who = ranks_in_words(bearers, {contributor.member: contributor.place for contributor in there})
        text = first_non_finite(key, who, what)
        self._texts[is_forward] = text = text[:MOST_TEXT]
        if is_forward:
            # Gradients that came before were no overflow then.
            for found in self._texts.values():
                logger.warning("job %r, group %r: %s", key.job, key.group, found)
        else:
            logger.info("job %r, group %r: %s", key.job, key.group, text)

    def _count(self, step: int) -> None:
        """Count the steps in a row; a step has many rounds."""
        if step != self._step:
            self._in_a_row = self._in_a_row + 1 if step == self._step + 1 else 1
            self._step = step
