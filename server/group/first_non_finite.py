"""First non-finite: whose NaN or infinity came first to a group, forward and backward, for its log and status."""

import logging
from collections.abc import Mapping
from itertools import islice

from server.group.contributor import Contributor
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import not_finite_in_words
from statsd_bn.round_key import FORWARD, RoundKey, first_non_finite

logger = logging.getLogger("statsd_bn.server")

# How many of them are named.
TOLD_OF = 8

# Letters of a text, since a report has them all.
MOST_TEXT = 1024


class FirstNonFinite:
    """What is remembered of one life of a group."""

    def __init__(self) -> None:
        self._texts: dict[bool, str] = {}

    @property
    def texts(self) -> list[str]:
        """What to say of them, the first one first; none where all aggregates were finite."""
        return list(self._texts.values())

    def take(self, aggregate: Aggregate, contributors: Mapping[int, Contributor]) -> None:
        """Note an aggregate that is not finite; only the first in each direction counts."""
        self.note(aggregate.key, aggregate.non_finite, not_finite_in_words(aggregate.values), contributors)

    def note(self, key: RoundKey, bearers: Members, what: str, contributors: Mapping[int, Contributor]) -> None:
        """Likewise, where a member has told of it.

        Args:
            key: of the round.
            bearers: who brought what is not finite.
            what: how many channels were not, in words.
            contributors: of the group, by number.
        """
        is_forward = key.phase == FORWARD
        if is_forward in self._texts:
            return
        names = [str(contributors.get(member, f"rank {member}")) for member in islice(bearers, TOLD_OF)]
        others = f" and {len(bearers) - TOLD_OF} more" if len(bearers) > TOLD_OF else ""
        text = first_non_finite(key, ", ".join(names) + others, what)
        self._texts[is_forward] = text = text[:MOST_TEXT]
        # Training in float16 begins with such gradients, which only its own process can tell from others.
        level = logging.WARNING if is_forward else logging.INFO
        logger.log(level, "job %r, group %r: %s", key.job, key.group, text)
