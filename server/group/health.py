"""Insight: what is noticed of a group's members: how long their rounds take, who is slow, whose data differ.

In each round a member waits from its contribution to the answer, and between two rounds it computes. Whoever is slow
waits least, so what the others lose by it is what each of them waits more: the least wait among the others, less its
own. Ranks that are late in turn wait alike, and then nobody is named. This needs no more than a sum for each member,
and holds for rounds over the server and in shared memory alike: of those the members say themselves how long they
waited.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from server.group.contributor import Contributor
from server.group.membership import Membership
from server.group.open_rounds import OpenRounds
from server.security.quota import Room
from statsd_bn.errors import LimitExceeded, ProtocolError
from statsd_bn.messages import LatenessReport, RoundTrips, SkewStats
from statsd_bn.reduction import FloatArray
from statsd_bn.skew import Comparison
from statsd_bn.timing import Histogram

# Over which time; and how much of it one may cost the others.
WINDOW_SECONDS, MOST_HELD = 60.0, 0.1

# The first steps compile, search for kernels and fill caches, each rank in its own time.
STARTUP_SECONDS = 30.0

# Told once; again only if it was less than this meanwhile.
CALM = MOST_HELD / 2


@dataclass(frozen=True, slots=True)
class Minute:
    """What one window has shown.

    Attributes:
        waiting: the part of the time that each member waited, 0 to 1.
        score: how fast each member computes, 0 to 1: beside the fastest one, or beside its own best window, whichever
            is less.
        slowest: who waited least; None with fewer than two members.
        held: the part of the time that the others waited for that one.
    """

    waiting: Mapping[int, float] = field(default_factory=dict)
    score: Mapping[int, float] = field(default_factory=dict)
    slowest: int | None = None
    held: float = 0.0


@dataclass(slots=True)
class Pace:
    """How a group gets on, window after window.

    Attributes:
        minute: the latest whole window.
        due: when the current one is over; None before the first round.
        is_told: whether the slowest was told of, and has not been faster since.
    """

    minute: Minute = field(default_factory=Minute)
    due: float | None = None
    is_told: bool = False
    _rounds: int = 0
    _waited: dict[int, float] = field(default_factory=dict)
    _best: dict[int, float] = field(default_factory=dict)

    def begin(self, now: float, rounds: int) -> None:
        """Note the first round."""
        if self.due is None and rounds:
            self.due = now + STARTUP_SECONDS

    def end_window(self, now: float, rounds: int, waited: Mapping[int, float]) -> bool:
        """End a window and begin the next.

        Args:
            now: the time; the window was due.
            rounds: how many the group has had.
            waited: the seconds that each member has waited since it came.

        Returns:
            Whether the slowest is to be told of.
        """
        seconds = WINDOW_SECONDS + (now - self.due if self.due is not None else 0.0)
        had = rounds - self._rounds
        shares = {
            member: min(1.0, max(0.0, total - self._waited[member]) / seconds)
            for member, total in waited.items()
            if member in self._waited
        }
        self._rounds, self._waited, self.due = rounds, dict(waited), now + WINDOW_SECONDS
        self.minute = self._minute(shares, seconds, had) if had and shares else Minute()
        if self.minute.held < CALM:
            self.is_told = False
        is_news = self.minute.held > MOST_HELD and not self.is_told
        self.is_told = self.is_told or is_news
        return is_news

    def forget(self, member: int) -> None:
        """Forget a member that has left or was lost; another may come with its number."""
        self._waited.pop(member, None)
        self._best.pop(member, None)

    def told(self, member: int) -> dict[str, float]:
        """Entries of a report about a member; none before its first whole window."""
        if member not in self.minute.waiting:
            return {}
        return {"waiting": self.minute.waiting[member], "score": self.minute.score[member]}

    def _minute(self, shares: Mapping[int, float], seconds: float, rounds: int) -> Minute:
        # Seconds of computing for a round; never 0, since it divides.
        computing = {member: max(1e-9, (1 - share) * seconds / rounds) for member, share in shares.items()}
        best = min(computing.values())
        score = {}
        for member, own in computing.items():
            self._best[member] = min(own, self._best.get(member, own))
            score[member] = min(best, self._best[member]) / own
        slowest, *others = sorted(shares, key=lambda member: shares[member])
        if not others:
            return Minute(shares, score)
        return Minute(shares, score, slowest, shares[others[0]] - shares[slowest])


logger = logging.getLogger("statsd_bn.server")

# The latest are kept, and no text is longer than this.
MOST_FINDINGS, MOST_TEXT = 8, 512


@dataclass(frozen=True, slots=True)
class Finding:
    """One of them.

    Attributes:
        kind: what it is about, as "straggler".
        rank: whose it is.
        step: the step that the group was in.
        text: what to say, one line.
        layer: the layer that shows it; empty if it is about none.
    """

    kind: str
    rank: int
    step: int
    text: str
    layer: str = ""


class Findings:
    """Those of one group.

    Args:
        name: of job and group, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: deque[Finding] = deque(maxlen=MOST_FINDINGS)

    def add(self, kind: str, rank: int, step: int, text: str, layer: str = "") -> None:
        """Keep a finding, and warn of it."""
        finding = Finding(kind, rank, step, text[:MOST_TEXT], layer)
        self._found.append(finding)
        logger.warning("%s: %s: %s", self._name, finding.kind, finding.text)

    @property
    def told(self) -> list[dict[str, Any]]:
        """Entries of a report, the oldest first."""
        return [asdict(finding) for finding in self._found]


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
