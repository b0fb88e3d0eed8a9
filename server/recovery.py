"""Recovery: after a restart of the server its members come back, and name each other.

The server has written nothing down. A member that comes back says who belonged to the group, as it last heard, and the
group waits until all who were named are there, as long as it would wait for any sign of life.
"""

from collections.abc import Collection

from server.liveness import RECONNECT_SECONDS
from statsd_bn.members import Members


class Recovery:
    """Who is still to come back to a group.

    Args:
        now: when the first member came back.
        silence: how long to wait for the others, in seconds.
    """

    def __init__(self, now: float, silence: float) -> None:
        self._since = now
        self._silence = silence
        self._named: set[int] = set()

    def name(self, known: Members) -> None:
        """Takes note of the members that one that has come back knows of."""
        self._named.update(known)

    @property
    def nr_named(self) -> int:
        """How many members are named."""
        return len(self._named)

    def forget(self, member: int) -> None:
        """Waits no longer for a member."""
        self._named.discard(member)

    def missing(self, present: Collection[int]) -> list[int]:
        """Returns who is still to come."""
        return sorted(self._named.difference(present))

    def is_late(self, now: float) -> bool:
        """Returns whether the time to come back is over."""
        return now - self._since >= self._silence

    def late(self, now: float, present: Collection[int]) -> list[int]:
        """Returns who has not come in time, and waits no longer for them."""
        if not self.is_late(now):
            return []
        late = self.missing(present)
        self._named.difference_update(late)
        return late

    def is_over(self, now: float, present: Collection[int], *, is_elastic: bool) -> bool:
        """Returns whether nobody is missing."""
        # The members of an elastic group may not know of one that joined last; it comes back within the same moment.
        settled = not is_elastic or now - self._since >= RECONNECT_SECONDS
        return settled and not self.missing(present)
