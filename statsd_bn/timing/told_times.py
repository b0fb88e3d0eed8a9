"""Told times: seconds that a session counts, where it costs its rounds nothing, and tells the server.

The thread that trains appends a number to a queue. The heartbeat's thread counts what has come, by bucket, and tells
the server the whole count, once a second at most, and now and then without news. So a frame that is lost loses nothing,
and a server that was restarted learns all of it.
"""

from collections import deque

from statsd_bn.timing.histogram import Histogram

# What can come between two heartbeats: hardly anybody has 65,536 rounds in a second.
MOST_NEW = 2**16

# How often a member tells, in seconds. In a larger group than this each tells less often.
SECONDS, MOST_TOLD = 1.0, 64

# After how many times as long it tells again although there is no news.
PAUSES = 10


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
