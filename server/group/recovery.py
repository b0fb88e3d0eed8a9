"""Recovery: after a restart of the server the members of a group come back, and name each other.

The server has written nothing down. A member that comes back says who belonged to the group, as it last heard, and the
group waits until all who were named are there, as long as it would wait for any sign of life.
"""

from collections.abc import Collection

from statsd_bn.members import Members

# How long a member that nothing reaches may take to be heard again: ZeroMQ connects anew after a tenth of a second,
# and the client then speaks at once. Longer would delay the news of a killed process, which is to take under a second.
RECONNECT_SECONDS = 0.3


class Recovery:
    """Members that are still to come back to a group.

    Args:
        now: when the first member came back.
        silence: how long to wait for the others, in seconds.
    """

    def __init__(self, now: float, silence: float) -> None:
        self._since = now
        self._silence = silence
        self._named: set[int] = set()
        # Of the results that members were given: the step, and whom the result covers.
        self._told: set[tuple[int, Members]] = set()

    def name(self, known: Members) -> None:
        """Wait for the members that a returned member knows of."""
        self._named.update(known)

    @property
    def nr_named(self) -> int:
        """Number of members that were named."""
        return len(self._named)

    def forget(self, member: int) -> None:
        """Wait no longer for a member."""
        self._named.discard(member)

    def tell(self, step: int, covered: Members) -> None:
        """Record that a member was given a result of a step, and which members the result covers."""
        self._told.add((step, covered))

    @property
    def has_results(self) -> bool:
        """Whether any member was given a result."""
        return bool(self._told)

    def is_left_out(self, member: int, since: int) -> bool:
        """Whether the others had gone on without a member, in a step from `since` on."""
        return any(since <= step and member not in covered for step, covered in self._told)

    def missing(self, present: Collection[int]) -> list[int]:
        """Members that are still to come."""
        return sorted(self._named.difference(present))

    def is_late(self, now: float) -> bool:
        """Whether the time to come back is over."""
        return now - self._since >= self._silence

    def late(self, now: float, present: Collection[int]) -> list[int]:
        """Members that have not come in time; it waits no longer for them."""
        if not self.is_late(now):
            return []
        late = self.missing(present)
        self._named.difference_update(late)
        return late

    def is_over(self, now: float, present: Collection[int], *, is_elastic: bool) -> bool:
        """Whether nobody is missing."""
        # The members of an elastic group may not know of one that joined last; it comes back within the same moment.
        settled = not is_elastic or now - self._since >= RECONNECT_SECONDS
        return settled and not self.missing(present)
