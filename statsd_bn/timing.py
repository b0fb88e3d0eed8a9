"""Histograms of durations, with buckets of doubling width. Pure, without a clock."""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

from statsd_bn import limits

# Upper bounds in seconds: 20 µs, 40 µs, ... 84 s. One more bucket counts longer durations.
BOUNDS: tuple[float, ...] = tuple(20e-6 * 2**power for power in range(limits.BUCKETS - 1))

MAX_BUCKET = 2**64 - 1  # a bucket counts no further, whatever members report
MAX_NEW = 2**16  # durations between two heartbeats: few jobs have 65,536 rounds in a second

# A member reports at intervals of SECONDS, or longer ones in groups of more than MAX_FREQUENT members. Without new
# durations it repeats its report after REPEAT_INTERVALS such intervals.
SECONDS, MAX_FREQUENT, REPEAT_INTERVALS = 1.0, 64, 10


class Histogram:
    """Counts of durations, by bucket."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts: array[int] = array("Q", bytes(8 * (len(BOUNDS) + 1)))
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = bisect_left(BOUNDS, seconds)
        self.counts[bucket] = min(self.counts[bucket] + 1, MAX_BUCKET)
        self.sum += seconds

    def add_growth(self, before: Sequence[int], counts: Sequence[int], seconds: float) -> None:
        """Add the growth of another histogram: its counts before and after, and the growth of its sum."""
        for bucket, (old, new) in enumerate(zip(before, counts, strict=True)):
            self.counts[bucket] = min(self.counts[bucket] + new - old, MAX_BUCKET)
        self.sum += seconds

    @property
    def total(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def report(self) -> dict[str, Any]:
        """Entry of a status report: the buckets up to the last one that is not empty, and the sum."""
        last = max((place for place, count in enumerate(self.counts) if count), default=-1)
        return {"bounds": list(BOUNDS[: last + 1]), "counts": self.counts[: last + 1].tolist(), "sum": self.sum}


def quantile(counts: Sequence[int], part: float) -> float:
    """Upper bound in seconds of the bucket with this quantile (0 to 1); 0 if all counts are 0."""
    rest = part * sum(counts)
    # A report omits empty buckets at the end.
    for count, bound in zip(counts, (*BOUNDS, BOUNDS[-1]), strict=False):
        rest -= count
        if count and rest <= 0:
            return bound
    return 0.0


class DurationReporter:
    """Durations of one kind that a session measures and reports to the server, at no cost to its rounds."""

    # Any thread appends durations to a queue with `add`. The heartbeat thread moves them into the histogram, and
    # reports the whole histogram: once a second at most, and now and then without new durations. So a lost frame loses
    # no durations, and a restarted server receives all of them.

    def __init__(self, members: int) -> None:
        self._queue: deque[float] = deque(maxlen=MAX_NEW)
        self.add = self._queue.append
        self.histogram = Histogram()
        self._reported = 0
        self._interval = SECONDS * max(1.0, members / MAX_FREQUENT)
        self._due = self._repeat_at = 0.0

    def collect(self) -> None:
        """Move the queued durations into the histogram."""
        for _ in range(len(self._queue)):
            self.histogram.add(self._queue.popleft())

    def is_due(self, now: float) -> bool:
        """Whether it is time to report."""
        total = self.histogram.total
        return total > 0 and now >= (self._due if total > self._reported else self._repeat_at)

    def report(self, now: float) -> Histogram:
        """Returns the histogram, and schedules the next report."""
        self._reported = self.histogram.total
        self._due, self._repeat_at = now + self._interval, now + REPEAT_INTERVALS * self._interval
        return self.histogram
