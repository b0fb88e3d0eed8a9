"""Told times: how long what a session does in its rounds took, counted where it costs the rounds nothing.

The thread that trains appends a number to a queue. The heartbeat's thread counts what has come, by bucket, and tells
the server the whole count, once a second at most. So a frame that is lost loses nothing.
"""

from collections import deque

from statsd_bn.timing.histogram import Histogram

# What can come between two heartbeats: hardly anybody has 65,536 rounds in a second.
MOST_NEW = 2**16

# How often a member tells, in seconds. In a larger group than this each tells less often.
SECONDS, MOST_TOLD = 1.0, 64


class ToldTimes:
    """Those of one kind, of one session.

    One thread at a time may take from it; any may `add`.

    Args:
        members: how many the group has.

    Attributes:
        add: takes the seconds of one more.
        counted: what has come, as far as it was counted.
    """

    def __init__(self, members: int) -> None:
        self._new: deque[float] = deque(maxlen=MOST_NEW)
        self.add = self._new.append
        self.counted = Histogram()
        self._told = 0
        self._pause = SECONDS * max(1.0, members / MOST_TOLD)
        self._due = 0.0

    def count(self) -> None:
        """Count what has come."""
        for _ in range(len(self._new)):
            self.counted.add(self._new.popleft())

    def is_due(self, now: float) -> bool:
        """Whether there is something new to tell, and it is time to."""
        return now >= self._due and self.counted.total > self._told

    def tell(self, now: float) -> Histogram:
        """All that was counted; it is told now."""
        self._told, self._due = self.counted.total, now + self._pause
        return self.counted
