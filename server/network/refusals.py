"""Refusals: how much has to be refused on each connection, and when that is too much; free of I/O.

What is refused is counted, and weighed by the processor time that it took. An honest member may be refused because the
server no longer knows its session; but it never sends unsound messages.
"""

from collections import defaultdict
from dataclasses import dataclass

from server.limits.quota import Quota
from statsd_bn.errors import LimitExceeded

# How long `Refusals` remembers unsound messages, and ignores a connection that is being ended: ZeroMQ still hands over
# what has come over it.
MEMORY_SECONDS = 10.0


@dataclass(slots=True)
class _Recent:
    frames: int = 0
    seconds: float = 0.0


class Refusals:
    """What was refused, by routing id.

    Args:
        quota: how much may be refused.

    Attributes:
        ignored: the routing ids of connections that are being ended, and until when to ignore them.
    """

    def __init__(self, quota: Quota) -> None:
        self.ignored: dict[bytes, float] = {}
        self._quota = quota
        self._recent: dict[bytes, _Recent] = defaultdict(_Recent)
        self._bad: dict[bytes, int] = defaultdict(int)
        self._bad_since = 0.0

    def add(self, peer: bytes, seconds: float, *, is_bad: bool) -> LimitExceeded | None:
        """Count a refused message; returns an error if it was one too many from this peer.

        Args:
            peer: its routing id.
            seconds: the processor time that it took.
            is_bad: whether it was unsound.
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
        """Ignore a connection that is being ended."""
        self.ignored[peer] = now + MEMORY_SECONDS

    def forgive(self, now: float) -> None:
        """Forget what was refused lately; call it four times a second."""
        self._recent.clear()
        if now - self._bad_since >= MEMORY_SECONDS:
            self._bad.clear()
            self._bad_since = now
        for peer in [peer for peer, until in self.ignored.items() if until <= now]:
            del self.ignored[peer]


def _too_much(what: str, most: float) -> LimitExceeded:
    text = f"expected at most {most:g} {what}, got more; the connection ends"
    return LimitExceeded(text, limit=most, what=what)
