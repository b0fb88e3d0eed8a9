"""Histogram: how long things took, in buckets that double."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from statsd_bn import limits

# Upper bounds in seconds: 20 µs, 40 µs, ... 84 s. What took longer is in one bucket more.
BOUNDS: tuple[float, ...] = tuple(20e-6 * 2**power for power in range(limits.BUCKETS - 1))

# A bucket counts no further than this, whatever members tell of.
MOST = 2**64 - 1


class Histogram:
    """Counts of seconds, by bucket.

    Attributes:
        counts: one for each of `BOUNDS`, and one for all beyond.
        sum: of all seconds.
    """

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts: array[int] = array("Q", bytes(8 * (len(BOUNDS) + 1)))
        self.sum = 0.0

    def grow(self, before: Sequence[int], counts: Sequence[int], seconds: float) -> None:
        """Add what another one has counted since it had these counts.

        Args:
            before: its counts before.
            counts: its counts now, none less.
            seconds: by how much its sum has grown.
        """
        for bucket, (old, new) in enumerate(zip(before, counts, strict=True)):
            self.counts[bucket] = min(self.counts[bucket] + new - old, MOST)
        self.sum += seconds

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = bisect_left(BOUNDS, seconds)
        self.counts[bucket] = min(self.counts[bucket] + 1, MOST)
        self.sum += seconds

    @property
    def total(self) -> int:
        """How many were counted."""
        return sum(self.counts)

    def quantile(self, part: float) -> float:
        """Upper bound of the bucket in which that part of all ends, in seconds; 0 of an empty one.

        Args:
            part: from 0 to 1; 0.5 for the median.
        """
        rest = part * self.total
        for count, bound in zip(self.counts, (*BOUNDS, BOUNDS[-1]), strict=True):
            rest -= count
            if count and rest <= 0:
                return bound
        return 0.0

    @property
    def told(self) -> dict[str, Any]:
        """Entry of a report: the buckets up to the last one that has any, and the sum."""
        last = max((place for place, count in enumerate(self.counts) if count), default=-1)
        return {"bounds": list(BOUNDS[: last + 1]), "counts": self.counts[: last + 1].tolist(), "sum": self.sum}
