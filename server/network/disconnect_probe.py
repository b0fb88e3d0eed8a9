"""Probing: when to try whether members are still there whose connections may have ended.

ZeroMQ tells that a connection has ended, but not whose it was.
"""

import math

# How long after a connection has ended the members are tried: ZeroMQ tells of the end a moment before it acts on it,
# and the many connections of a job that ends cost one pass.
PROBE_SECONDS = 0.05


class Probing:
    """The passes over the members, and when they are due.

    Attributes:
        disconnected: when a connection has ended last; who was heard since need not be tried.
        due: when the next pass is; infinity if none.
    """

    def __init__(self) -> None:
        self.disconnected = -math.inf
        self.due = math.inf

    def connection_ended(self, now: float) -> None:
        """Takes note that one has; to be called when everything has been received that came over it."""
        self.disconnected = now
        self.due = min(self.due, now + PROBE_SECONDS)

    def begin_if_due(self, now: float) -> bool:
        """Returns whether it is time for a pass, which then begins: the caller is to make it."""
        if now < self.due:
            return False
        # What has ended after this pass was put on its way needs another.
        due = self.disconnected + PROBE_SECONDS
        self.due = due if due > self.due else math.inf
        return True
