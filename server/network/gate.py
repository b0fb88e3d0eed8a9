"""Gate: limits how many new connections are let in; free of I/O.

Without keys a peer can still claim a routing id, and libzmq ends the server's process if ZeroMQ gives the same number
to another peer. If half of N connections claim a number each, and the other half are given one, that happens with
probability (N / 2)^2 / 2^32. So new connections come in at a limited rate. One too many waits in line, so that
newcomers beside a flood of connections come in in turn. If the line is longer than a handshake may take, the newcomer
is turned away, and tries again by itself. With keys each key has a rate and a line of its own. There is no limit where
only this user can connect.
"""

from dataclasses import dataclass

# How many of the connections at once come back at the full rate, and how much slower the others do. A claim is held for
# 10 s, until the connection is too silent: with 15 in a second ((256 + 150) / 2)^2 meet in each 27 s, and all 4,096
# once in 85 minutes. Either ends a server about once in a month; all 4,096 at the full rate would do so in three days.
SOON_BACK, SLOWER = 256, 20

# How long one may wait in line, as a part of the time for a handshake.
LINE = 0.8


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled: float


class Gate:
    """A rate of new connections for each key, or one for all where there are no keys.

    Args:
        at_once: how many may come together.
        per_second: how many more may come each second from then on.
        soon_back: how many of those at once come back at that rate; the others take longer.
        timeout: how many seconds one may wait.
    """

    def __init__(self, at_once: float, per_second: float, *, soon_back: float, timeout: float) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._soon_back = min(soon_back, at_once)
        self._timeout = timeout
        self._buckets: dict[str, _Bucket] = {}
        self._is_lifted = False

    def lift(self) -> None:
        """Let in all that come from now on: only this user can connect."""
        self._is_lifted = True

    def wait_of(self, now: float, key: str) -> float | None:
        """Seconds that a new connection with a key has to wait; None if that is too long."""
        if self._is_lifted:
            return 0.0
        bucket = self._buckets.setdefault(key, _Bucket(self._at_once, now))
        self._fill(bucket, now - bucket.filled)
        bucket.filled = now
        wait = max(0.0, 1.0 - bucket.tokens) / self._per_second
        if wait > self._timeout:
            return None
        bucket.tokens -= 1
        return wait

    def _fill(self, bucket: _Bucket, seconds: float) -> None:
        soon = max(0.0, min(seconds, (self._soon_back - bucket.tokens) / self._per_second))
        more = soon * self._per_second + (seconds - soon) * self._per_second / SLOWER
        bucket.tokens = min(self._at_once, bucket.tokens + more)
