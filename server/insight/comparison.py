"""Comparison: what the members' data show beside each other, at most so often, however often somebody tells of them."""

import math
from collections.abc import Sequence

from server.insight.copies import Copies, Same
from server.insight.skew import Different, Skew
from statsd_bn.reduction import FloatArray

# Looks at a group that come sooner than this after another one are dropped.
LEAST_SECONDS = 0.5


class Comparison:
    """That of one group.

    Args:
        members: how many the group has.
    """

    def __init__(self, members: int) -> None:
        self._skew = Skew(members)
        self._copies = Copies()
        self._latest = -math.inf

    def look(
        self, now: float, step: int, layers: Sequence[str], values: FloatArray
    ) -> tuple[list[Different], list[Same]]:
        """Take the figures of a step.

        Args:
            now: the time, in seconds.
            step: the step.
            layers: the layers' names, in the order of the rounds.
            values: their figures, shape (layers, members, 8).

        Returns:
            Members that are different, and members that are the same as another, as far as that is news.
        """
        if now - self._latest < LEAST_SECONDS:
            return [], []
        self._latest = now
        return self._skew.look(step, layers, values), self._copies.look(step, values)

    def told(self, first: int, most_bytes: int) -> tuple[int, list[str], FloatArray]:
        """Layers, their names and their average figures, see `Skew.told`."""
        return self._skew.told(first, most_bytes)

    @property
    def kept(self) -> int:
        """How many bytes it keeps; what it keeps of copies is a part of each member's own."""
        return self._skew.kept

    def more_for(self, layers: Sequence[str]) -> int:
        """Number of bytes more that it would keep after a look at these layers, at most."""
        return self._skew.more_for(layers)
