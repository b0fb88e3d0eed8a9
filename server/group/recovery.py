"""Recovery: rebuilds a group from its members after a server restart.

The server stores nothing on disk. A member that reconnects names the members that it last knew of, and the group waits
for all of them, as long as it would wait for any sign of life.
"""

from collections.abc import Collection

from statsd_bn.members import Members

# How long an unreachable member may take to reconnect: ZeroMQ reconnects after 0.1 s, and the client then sends at
# once. A longer time would delay the report of a killed process, which should take less than a second.
RECONNECT_SECONDS = 0.3


class Recovery:
    """The members that a group waits for after a server restart."""

    def __init__(self, now: float, silence: float) -> None:
        self._since = now
        self._silence = silence
        self._expected: set[int] = set()
        # Step and covered members of each result from before the restart.
        self._results: set[tuple[int, Members]] = set()

    def expect(self, known: Members) -> None:
        """Wait for the members that a reconnected member knows of."""
        self._expected.update(known)

    @property
    def nr_expected(self) -> int:
        """Number of expected members."""
        return len(self._expected)

    def drop(self, member: int) -> None:
        """Stop waiting for a member."""
        self._expected.discard(member)

    def add_result(self, step: int, covered: Members) -> None:
        """Record a result that a member received before the restart: its step and covered members."""
        self._results.add((step, covered))

    @property
    def has_results(self) -> bool:
        """Whether any member received a result before the restart."""
        return bool(self._results)

    def is_left_out(self, member: int, since: int) -> bool:
        """Whether any result of step `since` or later lacks a member."""
        return any(since <= step and member not in covered for step, covered in self._results)

    def missing(self, present: Collection[int]) -> list[int]:
        """Expected members that are not present."""
        return sorted(self._expected.difference(present))

    def is_timed_out(self, now: float) -> bool:
        """Whether the time to reconnect is over."""
        return now - self._since >= self._silence

    def expire(self, now: float, present: Collection[int]) -> list[int]:
        """Stop waiting for missing members after the timeout; returns them."""
        if not self.is_timed_out(now):
            return []
        late = self.missing(present)
        self._expected.difference_update(late)
        return late

    def is_complete(self, now: float, present: Collection[int], *, is_elastic: bool) -> bool:
        """Whether no expected member is missing."""
        # The members of an elastic group may not know the latest newcomer, which reconnects at the same time.
        settled = not is_elastic or now - self._since >= RECONNECT_SECONDS
        return settled and not self.missing(present)
