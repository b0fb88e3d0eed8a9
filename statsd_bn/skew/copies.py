"""Copies: members whose data are the same, to the last bit, look after look.

Members with different samples do not have the same means and variances in every layer. Those that have read the same
part of the data, or draw it with the same seed, do, as long as nothing in the model is random.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from statsd_bn.reduction import FloatArray
from statsd_bn.skew import COUNT, MEAN, VARIANCE

# One batch may come twice.
IN_A_ROW = 8

_COMPARED = [COUNT, MEAN, VARIANCE]


@dataclass(frozen=True, slots=True)
class Same:
    """A member whose data are those of another one.

    Attributes:
        member: its index in the group.
        other: the first member that has the same data.
        layer: the earliest one in a step, of those that were looked at.
        since: the step in which that was seen first.
    """

    member: int
    other: int
    layer: str
    since: int


class Copies:
    """Those of one group."""

    def __init__(self) -> None:
        # Of each pair that is the same now: since which step, and for how many looks.
        self._pairs: dict[tuple[int, int], tuple[int, int]] = {}
        self._told: set[tuple[int, int]] = set()

    def look(self, step: int, layers: Sequence[str], values: FloatArray) -> list[Same]:
        """Take the figures of some layers in a step, shape (layers, members, 8); returns what is news."""
        before = self._pairs
        self._pairs = {}
        for pair in _same_pairs(values):
            since, looks = before.get(pair, (step, 0))
            self._pairs[pair] = since, looks + 1
        news = {
            pair: since for pair, (since, looks) in self._pairs.items() if looks == IN_A_ROW and pair not in self._told
        }
        self._told.update(news)
        return [Same(member, other, layers[0], since) for (member, other), since in news.items()]


def _same_pairs(values: FloatArray) -> list[tuple[int, int]]:
    """Returns each member that has the figures of an earlier one in all layers, with that one."""
    firsts: dict[bytes, int] = {}
    found = []
    for member, figures in enumerate(values.swapaxes(0, 1)):
        # Constant input, or none, is the same for good reason.
        if not np.all(figures[:, COUNT]) or not np.any(figures[:, VARIANCE]):
            continue
        other = firsts.setdefault(figures[:, _COMPARED].tobytes(), member)
        if other != member:
            found.append((member, other))
    return found
