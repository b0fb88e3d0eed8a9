"""Gate: how many new connections are let in; free of I/O.

Without keys a peer can still hold a routing id that ZeroMQ gives to another one by chance, which ends the server; half
of the connections that come at once, set against the other half, and that over 2^32, is how likely that is. So they
come in only so fast. With keys each has a measure of its own.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled: float


class Gate:
    """A measure of new connections for each key, or one for all where there are no keys.

    Args:
        at_once: how many may come together.
        per_second: how many more may come each second from then on.
    """

    def __init__(self, at_once: float, per_second: float) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._buckets: dict[str, _Bucket] = {}

    def admits(self, now: float, key: str) -> bool:
        """Returns whether one more connection may be made now with a key; counts it if so."""
        bucket = self._buckets.setdefault(key, _Bucket(self._at_once, now))
        bucket.tokens = min(self._at_once, bucket.tokens + (now - bucket.filled) * self._per_second)
        bucket.filled = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True
