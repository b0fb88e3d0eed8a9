"""Insight: what is noticed of a group's members: how long their rounds take, who is slow, whose data differ."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from server.insight.findings import Findings
from server.insight.pace import Pace
from server.limits.quota import Room
from server.membership.contributor import Contributor
from server.membership.membership import Membership
from server.rounds.open_rounds import OpenRounds
from statsd_bn.errors import LimitExceeded, ProtocolError
from statsd_bn.messages import LatenessReport, RoundTrips, SkewStats
from statsd_bn.reduction import FloatArray
from statsd_bn.skew import Comparison
from statsd_bn.timing import Histogram

# So many rounds say something.
ENOUGH = 100


class Insight:
    """What is noticed in one life of a group.

    Args:
        membership: who belongs to the group.
        open_rounds: its rounds.
        room: what the group may keep.

    Attributes:
        pace: how the group gets on.
        comparison: what the members' data show beside each other.
        findings: what was noticed.
        round_trips: how long the rounds of all members took, as these say.
    """

    def __init__(self, membership: Membership, open_rounds: OpenRounds, room: Room) -> None:
        self._membership = membership
        self._open_rounds = open_rounds
        self._room = room
        self.pace = Pace()
        self.comparison = Comparison(membership.world_size)
        self.findings = Findings(f"job {membership.job!r}, group {membership.group!r}")
        self.round_trips = Histogram()

    @property
    def kept(self) -> int:
        """How many bytes are kept."""
        return self.comparison.kept

    def forget(self, contributor: Contributor) -> None:
        """Forget a member that has left or was lost."""
        self.pace.forget(contributor.member)

    def count(self, contributor: Contributor, told: RoundTrips | LatenessReport) -> None:
        """Take how long a member's rounds have taken, or how late it came to those in memory.

        It always tells of all of them, so what is less than before is no news.
        """
        if isinstance(told, RoundTrips):
            before, everywhere = contributor.trips, [self.round_trips]
        else:
            before, everywhere = contributor.told_behind, [contributor.behind, self._open_rounds.lateness]
        seconds = told.microseconds / 1e6
        if seconds < before.sum or any(new < old for new, old in zip(told.counts, before.counts, strict=True)):
            return
        for counted in (*everywhere, before):
            counted.grow(tuple(before.counts), told.counts, seconds - before.sum)

    def look_at_pace(self, now: float, rounds: int) -> None:
        """Once in a while, say who holds the others up.

        Args:
            now: the time.
            rounds: how many have succeeded.
        """
        pace = self.pace
        if pace.due is None:
            pace.begin(now, rounds)
        if pace.due is None or now < pace.due:
            return
        contributors = self._membership.contributors
        # In each round the first one waits from its beginning to its end, and the others so much less as they are late.
        longest = self._open_rounds.lengths.sum
        waited = {one.member: longest - one.late + one.waited for one in contributors.values()}
        if pace.end_window(now, rounds, waited):
            slowest = contributors[pace.minute.slowest or 0]
            step = self._membership.step_of(slowest)
            self.findings.add("straggler", slowest.member, step, _held_up(slowest, pace.minute.held))

    def file(self, now: float, told: SkewStats) -> None:
        """Take the figures of rounds that the members have had among themselves.

        Raises:
            ProtocolError: they are not those of this group's members.
        """
        members, is_elastic = self._membership.world_size, self._membership.is_elastic
        if is_elastic or told.values.shape[1] != members:
            raise ProtocolError(
                f"digest: expected the figures of the {members} members of a strict group, "
                f"got those of {told.values.shape[1]}{' of an elastic one' if is_elastic else ''}"
            )
        self._compare(now, told.step, told.names, told.values)

    def look(self, now: float) -> bool:
        """See how far the data of the members differ, in a step whose rows have come here; returns whether any had."""
        if (told := self._open_rounds.take_look(now)) is None:
            return False
        step, figures = told
        self._compare(now, step, list(figures), np.stack(list(figures.values())))
        return True

    def _compare(self, now: float, step: int, layers: Sequence[str], values: FloatArray) -> None:
        members = [one for _, one in sorted(self._membership.contributors.items())]
        if len(members) < self._membership.world_size:
            return
        with suppress(LimitExceeded):  # then they are not kept
            self._room.check(self.comparison.more_for(layers))
            for found in self.comparison.look(now, step, layers, values):
                text = found.in_words([str(member) for member in members])
                self.findings.add("skew", members[found.member].member, step, text, found.layer)


def _held_up(slow: Contributor, part: float) -> str:
    """What a member costs the others that come before it; `part` is that of the last minute in which they waited."""
    text = f"{slow} held the others up for {part:.0%} of the last minute"
    if slow.behind.total < ENOUGH:
        return text
    median, most = (1e3 * slow.behind.quantile(of_all) for of_all in (0.5, 0.99))
    when = f"by up to {median:.3g} ms in the median and {most:.3g} ms in 99 of 100 rounds"
    return f"{text}; where it came last, it was {when}"
