"""Restarts: whether a server that failed is started again, and how soon.

Only recent failures count. A long job survives a server that is killed every minute; if the server fails many times
within a minute it is not started again, and the job ends with an error.
"""

from collections import deque

# Failures longer ago than this do not count.
WINDOW_SECONDS = 60.0

# After so many failures within the window the server starts at once. Then the pauses double, so that the cause has time
# to pass.
AT_ONCE = 3
FIRST_PAUSE_SECONDS = 1.0

# After more failures than this within the window the next server would fail too. The pauses until then add up to 31 s.
AT_MOST = 8

# A server that failed to listen so often in a row will not listen the next time.
STARTS = 3


class Restarts:
    """The failures of one server; the caller tells the time."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()
        self._failed_starts = 0

    def pause(self, now: float, *, has_listened: bool) -> float | None:
        """Records a failure; returns the seconds until the next start, or None for no further start.

        Args:
            now: when the server failed.
            has_listened: whether members could reach it.
        """
        self._failed_starts = 0 if has_listened else self._failed_starts + 1
        self._ends.append(now)
        while self._ends[0] < now - WINDOW_SECONDS:
            self._ends.popleft()
        if self._failed_starts >= STARTS or len(self._ends) > AT_MOST:
            return None
        beyond = len(self._ends) - AT_ONCE
        return FIRST_PAUSE_SECONDS * 2 ** (beyond - 1) if beyond > 0 else 0.0
