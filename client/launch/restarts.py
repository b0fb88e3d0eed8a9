"""Restarts: whether a server that has ended is worth another start, and how soon.

What counts is how often it ended lately. A job of many hours outlives a server that is killed every minute; one whose
server falls again and again within a minute is told so, and ends.
"""

from collections import deque

# An end that is longer ago than this no longer counts.
WINDOW_SECONDS = 60.0

# So many ends within the window cost the members a moment each; from then on the pauses double, so that whatever kills
# it has time to pass.
AT_ONCE = 3
FIRST_PAUSE_SECONDS = 1.0

# Beyond so many within the window, whatever ends it would end the next one too. The pauses before add up to 31 s.
AT_MOST = 8

# A server that did not even begin to listen, so often in a row, will not the next time.
STARTS = 3


class Restarts:
    """The ends of one server, on any clock."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()
        self._starts_in_vain = 0

    def pause(self, now: float, *, has_listened: bool) -> float | None:
        """Takes note of an end, and returns the seconds until the next start; None if there is to be none.

        Args:
            now: when it ended.
            has_listened: whether it had come so far that members could reach it.
        """
        self._starts_in_vain = 0 if has_listened else self._starts_in_vain + 1
        self._ends.append(now)
        while self._ends[0] < now - WINDOW_SECONDS:
            self._ends.popleft()
        if self._starts_in_vain >= STARTS or len(self._ends) > AT_MOST:
            return None
        beyond = len(self._ends) - AT_ONCE
        return FIRST_PAUSE_SECONDS * 2 ** (beyond - 1) if beyond > 0 else 0.0
