"""Refusals: how much has to be refused on each connection, and when that is too much; free of I/O.

What is refused is counted and weighed by the processor time that it took. An honest member is refused where the server
does not know its session any more; what makes no sense at all never comes from one.
"""

from collections import defaultdict
from dataclasses import dataclass

from server.limits.quota import Quota
from statsd_bn.errors import LimitExceeded

# How long `Refusals` remembers what made no sense, and ignores a connection that is being ended: what has come over it
# is still read.
MEMORY_SECONDS = 10.0


@dataclass(slots=True)
class _Recent:
    frames: int = 0
    seconds: float = 0.0


class Refusals:
    """What was refused, by routing id.

    Args:
        quota: how much may be.

    Attributes:
        ignored: the routing ids of connections that are being ended, and until when.
    """

    def __init__(self, quota: Quota) -> None:
        self.ignored: dict[bytes, float] = {}
        self._quota = quota
        self._recent: dict[bytes, _Recent] = defaultdict(_Recent)
        self._bad: dict[bytes, int] = defaultdict(int)
        self._bad_since = 0.0

    def add(self, peer: bytes, seconds: float, *, is_bad: bool) -> LimitExceeded | None:
        """Takes note of a message that was refused; returns the error of a peer for which that was one too many.

        Args:
            peer: its routing id.
            seconds: the processor time that it took.
            is_bad: whether it made no sense.
        """
        recent = self._recent[peer]
        recent.frames += 1
        recent.seconds += seconds
        if recent.frames > self._quota.max_refusals:
            return _too_much("messages that are refused", self._quota.max_refusals)
        if recent.seconds > self._quota.max_refused_seconds:
            return _too_much("seconds spent on messages that are refused", self._quota.max_refused_seconds)
        if is_bad:
            self._bad[peer] += 1
            if self._bad[peer] > self._quota.max_bad_frames:
                return _too_much("messages that make no sense", self._quota.max_bad_frames)
        return None

    def ignore(self, now: float, peer: bytes) -> None:
        """Takes note that a connection is being ended."""
        self.ignored[peer] = now + MEMORY_SECONDS

    def forgive(self, now: float) -> None:
        """Forgets what was refused lately; to be called four times a second."""
        self._recent.clear()
        if now - self._bad_since >= MEMORY_SECONDS:
            self._bad.clear()
            self._bad_since = now
        for peer in [peer for peer, until in self.ignored.items() if until <= now]:
            del self.ignored[peer]


def _too_much(what: str, most: float) -> LimitExceeded:
    text = f"expected at most {most:g} {what}, got more; the connection ends"
    return LimitExceeded(text, limit=most, what=what)
