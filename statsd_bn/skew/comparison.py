"""Comparison: what the members' data show beside each other, at most so often, however often somebody tells of them."""

import math
from collections.abc import Sequence

from statsd_bn.reduction import FloatArray
from statsd_bn.skew.copies import Copies, Same
from statsd_bn.skew.few import MAJORITY, Apart, Changed, Few
from statsd_bn.skew.outliers import Different, Skew

# Looks at a group that come sooner than this after another one are dropped.
LEAST_SECONDS = 0.5

Found = Different | Same | Changed | Apart
"""What is told of members."""


class Comparison:
    """That of one group.

    Args:
        members: how many the group has.
    """

    def __init__(self, members: int) -> None:
        self._skew = Skew(members)
        self._copies = Copies()
        self._few = Few(self._skew.most) if 1 < members < MAJORITY else None
        self._latest = -math.inf

    def look(self, now: float, step: int, layers: Sequence[str], values: FloatArray) -> list[Found]:
        """Take the figures of a step; returns what they show, as far as that is news.

        Args:
            now: the time, in seconds.
            step: the step.
            layers: the layers' names, in the order of the rounds.
            values: their figures, shape (layers, members, 8).
        """
        if now - self._latest < LEAST_SECONDS:
            return []
        self._latest = now
        differing, copies = self._skew.look(step, layers, values), self._copies.look(step, layers, values)
        return [*differing, *copies, *(self._few.look(step, layers, values) if self._few else ())]

    def told(self, first: int, most_bytes: int) -> tuple[int, list[str], FloatArray]:
        """Layers, their names and their average figures, see `Skew.told`."""
        return self._skew.told(first, most_bytes)

    @property
    def kept(self) -> int:
        """How many bytes it keeps; what it keeps of copies is a part of each member's own."""
        return self._skew.kept + (self._few.kept if self._few else 0)

    def more_for(self, layers: Sequence[str]) -> int:
        """Number of bytes more that it would keep after a look at these layers, at most."""
        return self._skew.more_for(layers) + (self._few.more_for(layers) if self._few else 0)
