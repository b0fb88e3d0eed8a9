"""Probing: when to probe the members after a connection has ended.

ZeroMQ tells that a connection has ended, but not whose it was.
"""

import math

# How long after the end of a connection the members are probed: ZeroMQ tells of the end a moment before it acts on it,
# and one pass is enough for all the connections of a job that ends.
PROBE_SECONDS = 0.05


class Probing:
    """Passes over the members, and when they are due.

    Attributes:
        disconnected: when a connection ended last; a member that was heard since needs no probe.
        due: when the next pass is due; infinity if none is.
    """

    def __init__(self) -> None:
        self.disconnected = -math.inf
        self.due = math.inf

    def connection_ended(self, now: float) -> None:
        """Note the end of a connection; call it when everything that came over it has been received."""
        self.disconnected = now
        self.due = min(self.due, now + PROBE_SECONDS)

    def begin_if_due(self, now: float) -> bool:
        """Whether it is time for a pass; the caller then makes it."""
        if now < self.due:
            return False
        # A connection that ended after this pass became due needs another.
        due = self.disconnected + PROBE_SECONDS
        self.due = due if due > self.due else math.inf
        return True
