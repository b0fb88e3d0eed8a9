"""How long things took, counted in buckets that double. Pure: seconds go in."""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

from statsd_bn import limits

# Upper bounds in seconds: 20 µs, 40 µs, ... 84 s. What took longer is in one bucket more.
BOUNDS: tuple[float, ...] = tuple(20e-6 * 2**power for power in range(limits.BUCKETS - 1))

# A bucket counts no further than this, whatever members tell of.
MOST = 2**64 - 1

# What can come between two heartbeats: hardly anybody has 65,536 rounds in a second.
MOST_NEW = 2**16

# How often a member tells, in seconds. In a larger group than this each tells less often.
SECONDS, MOST_TOLD = 1.0, 64

# After how many times as long it tells again although there is no news.
PAUSES = 10


class Histogram:
    """Counts of seconds, by bucket."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts: array[int] = array("Q", bytes(8 * (len(BOUNDS) + 1)))
        self.sum = 0.0

    def grow(self, before: Sequence[int], counts: Sequence[int], seconds: float) -> None:
        """Add what another one has counted since its counts were `before`, in which time its sum grew by `seconds`."""
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
        """Upper bound of the bucket in which that part (0 to 1) of all ends, in seconds; 0 of an empty one."""
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


class ToldTimes:
    """Seconds of one kind that a session counts, where it costs its rounds nothing, and tells the server.

    The thread that trains appends a number to a queue, as any may, with `add`. The heartbeat's thread counts what has
    come, by bucket, and tells the server the whole count, once a second at most, and now and then without news. So a
    frame that is lost loses nothing, and a server that was restarted learns all of it.
    """

    def __init__(self, members: int) -> None:
        self._new: deque[float] = deque(maxlen=MOST_NEW)
        self.add = self._new.append
        self.counted = Histogram()
        self._told = 0
        self._pause = SECONDS * max(1.0, members / MOST_TOLD)
        self._due = self._again = 0.0

    def count(self) -> None:
        """Count what has come."""
        for _ in range(len(self._new)):
            self.counted.add(self._new.popleft())

    def is_due(self, now: float) -> bool:
        """Whether there is something to tell, and it is time to."""
        has_news = self.counted.total > self._told
        return now >= (self._due if has_news else self._again) and self.counted.total > 0

    def tell(self, now: float) -> Histogram:
        """All that was counted; it is told now."""
        self._told, self._due, self._again = self.counted.total, now + self._pause, now + PAUSES * self._pause
        return self.counted
