"""Rows: what the members bring to a round."""

from dataclasses import dataclass

from statsd_bn import limits
from statsd_bn.checks import check_integer, check_values
from statsd_bn.errors import ProtocolError
from statsd_bn.reduction import FloatArray

_new = object.__new__


# Not frozen: setting fields takes a third of the time, and each frame of a round makes one.
@dataclass(slots=True, eq=False)
class Rows:
    """What the replicas of one member bring to a round: a row each.

    Attributes:
        counts: values per channel of each replica, exact integers >= 0.
        values: shape (replicas, vectors, channels), float64. Two vectors: Σx and Σx² forward, Σdy and Σdy·(x-mean)
            backward. In a gather one replica and one vector, whose bits are the member's bytes.
    """

    counts: tuple[int, ...]
    values: FloatArray

    def __post_init__(self) -> None:
        check_integer("replicas", len(self.counts), 1, limits.MAX_REPLICAS)
        for count in self.counts:
            check_integer("count", count, 0, limits.MAX_COUNT)
        check_values(self.values, 3)
        if self.values.shape[0] != len(self.counts):
            raise ProtocolError(f"values: expected {len(self.counts)} rows, one per count, got {self.values.shape[0]}")


def sound_rows(counts: tuple[int, ...], values: FloatArray) -> Rows:
    """Returns rows that need no check, because rows with these counts and of this shape have passed it."""
    rows = _new(Rows)
    rows.counts, rows.values = counts, values
    return rows
