"""Health of a group: round durations, stragglers, and differences between the members' data.

In each round a member waits from its contribution to the answer, and between two rounds it computes. The slowest member
waits least, so the delay that it causes is the least wait among the others minus its own wait. If all ranks are late
equally often, their waits are equal and none is reported. This needs one sum per member, and also covers rounds in
shared memory, where members report their own waits.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from server.group.contributor import Contributor
from server.group.membership import Membership
from server.group.open_rounds import OpenRounds
from server.security.quota import MemoryShare
from statsd_bn.errors import LimitExceeded, ProtocolError
from statsd_bn.messages import LatenessReport, RoundTrips, SkewStats
from statsd_bn.reduction import FloatArray
from statsd_bn.skew import Duplicate, Outlier, SkewDetector
from statsd_bn.text import duration, percent
from statsd_bn.timing import Histogram

# Length of a window, and the share of it by which one member may delay the others.
WINDOW_SECONDS, MAX_DELAY_SHARE = 60.0, 0.1

# The first steps compile, tune kernels and fill caches, at a different speed on each rank.
STARTUP_SECONDS = 30.0

# A straggler is reported once, and again only after a window below this share.
RESET_SHARE = MAX_DELAY_SHARE / 2


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements of one window, by member; all are shares from 0 to 1."""

    waiting: Mapping[int, float] = field(default_factory=dict)  # share of the time that a member waited
    # Speed relative to the fastest member or to the member's own best window, whichever is lower.
    score: Mapping[int, float] = field(default_factory=dict)
    slowest: int | None = None  # the member that waited least; None with fewer than two members
    delay: float = 0.0  # share of the time that the others waited for the slowest


@dataclass(slots=True)
class Pace:
    """Speed of a group's members, window by window."""

    window: Window = field(default_factory=Window)  # the latest complete one
    due: float | None = None  # end of the current window; None before the first round
    is_reported: bool = False  # the slowest member was reported, and has not recovered since
    _rounds: int = 0
    _waited: dict[int, float] = field(default_factory=dict)
    _best: dict[int, float] = field(default_factory=dict)

    def is_due(self, now: float, rounds: int) -> bool:
        """Whether the current window ends now; the first one starts after the first round."""
        if self.due is None and rounds:
            self.due = now + STARTUP_SECONDS
        return self.due is not None and now >= self.due

    def end_window(self, now: float, rounds: int, waited: Mapping[int, float]) -> bool:
        """End a window and start the next one; returns whether to report the slowest member."""
        seconds = WINDOW_SECONDS + (now - self.due if self.due is not None else 0.0)
        had = rounds - self._rounds
        shares = {
            member: min(1.0, max(0.0, total - self._waited[member]) / seconds)
            for member, total in waited.items()
            if member in self._waited
        }
        self._rounds, self._waited, self.due = rounds, dict(waited), now + WINDOW_SECONDS
        self.window = self._measure(shares, seconds, had) if had and shares else Window()
        if self.window.delay < RESET_SHARE:
            self.is_reported = False
        is_news = self.window.delay > MAX_DELAY_SHARE and not self.is_reported
        self.is_reported = self.is_reported or is_news
        return is_news

    def remove(self, member: int) -> None:
        """Remove a member that has left or is lost; another one may join with its rank."""
        self._waited.pop(member, None)
        self._best.pop(member, None)

    def report(self, member: int) -> dict[str, float]:
        """Report entries of a member; empty before its first complete window."""
        if member not in self.window.waiting:
            return {}
        return {"waiting": self.window.waiting[member], "score": self.window.score[member]}

    def _measure(self, shares: Mapping[int, float], seconds: float, rounds: int) -> Window:
        # Seconds of computation per round; never 0, because it is a divisor.
        computing = {member: max(1e-9, (1 - share) * seconds / rounds) for member, share in shares.items()}
        best = min(computing.values())
        score = {}
        for member, own in computing.items():
            self._best[member] = min(own, self._best.get(member, own))
            score[member] = min(best, self._best[member]) / own
        slowest, *others = sorted(shares, key=lambda member: shares[member])
        if not others:
            return Window(shares, score)
        return Window(shares, score, slowest, shares[others[0]] - shares[slowest])


logger = logging.getLogger("statsd_bn.server")

# Findings kept, and the maximum length of their texts.
MAX_FINDINGS, MAX_TEXT_LENGTH = 8, 512


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about a member."""

    kind: str  # "straggler" or "skew"
    rank: int
    step: int  # of the group
    text: str  # one line
    layer: str = ""  # empty for a straggler
    numbers: Mapping[str, float] = field(default_factory=dict)  # further entries of the report
    skew: Outlier | Duplicate | None = None  # of the comparison


class Findings:
    """The latest findings of one group."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._findings: deque[Finding] = deque(maxlen=MAX_FINDINGS)

    def add(self, finding: Finding) -> None:
        """Store a finding and log it as a warning."""
        self._findings.append(finding)
        logger.warning("%s: %s: %s", self._name, finding.kind, finding.text)

    def report(self, comparison: SkewDetector) -> list[dict[str, Any]]:
        """Report entries, oldest first."""
        return [
            {
                "kind": finding.kind,
                "rank": finding.rank,
                "step": finding.step,
                "text": finding.text,
                "layer": finding.layer,
                **finding.numbers,
                **({"cleared": True} if finding.skew and not comparison.is_current(finding.skew) else {}),
            }
            for finding in self._findings
        ]


# Rounds that make percentiles meaningful.
MIN_ROUNDS = 100


class GroupHealth:
    """Health of one epoch of a group."""

    def __init__(self, membership: Membership, open_rounds: OpenRounds, memory: MemoryShare) -> None:
        self._membership = membership
        self._open_rounds = open_rounds
        self._memory = memory
        self.pace = Pace()
        self.comparison = SkewDetector(membership.world_size)
        self.findings = Findings(f"job {membership.job!r}, group {membership.group!r}")
        self.round_trips = Histogram()  # of all members, as reported

    def add_latency(self, contributor: Contributor, report: RoundTrips | LatenessReport) -> None:
        """Add a member's round trips, or its lateness in shared memory.

        Reports are cumulative, so one with lower counts than the last one is outdated.
        """
        if isinstance(report, RoundTrips):
            before, everywhere = contributor.round_trips, [self.round_trips]
        else:
            before, everywhere = contributor.reported_lateness, [contributor.lateness, self._open_rounds.lateness]
        seconds = report.microseconds / 1e6
        if seconds < before.sum or any(new < old for new, old in zip(report.counts, before.counts, strict=True)):
            return
        for counted in (*everywhere, before):
            counted.add_growth(tuple(before.counts), report.counts, seconds - before.sum)

    def update_pace(self, now: float, rounds: int) -> None:
        """End the current window if it is due, and report a straggler."""
        pace = self.pace
        if not pace.is_due(now, rounds):
            return
        contributors = self._membership.contributors
        # In each round the first member waits for the whole duration, and each other one for less by its delay.
        longest = self._open_rounds.durations.sum
        waited = {one.member: longest - one.delay + one.waited for one in contributors.values()}
        if pace.end_window(now, rounds, waited):
            slowest = contributors[pace.window.slowest or 0]
            step = self._membership.step_of(slowest)
            late = _late(slowest)
            text = _describe_straggler(slowest, pace.window.delay, late)[:MAX_TEXT_LENGTH]
            self.findings.add(Finding("straggler", slowest.member, step, text, numbers=late))

    def add_skew(self, now: float, report: SkewStats) -> None:
        """Add skew figures of rounds in shared memory."""
        members, is_elastic = self._membership.world_size, self._membership.is_elastic
        if is_elastic or report.values.shape[1] != members:
            raise ProtocolError(
                f"digest: expected the figures of the {members} members of a strict group, "
                f"got {report.values.shape[1]}{' of an elastic one' if is_elastic else ''}"
            )
        self._compare(now, report.step, report.names, report.values)

    def compare_samples(self, now: float) -> bool:
        """Compare the members' data in a sampled step; returns whether there was one."""
        if (sample := self._open_rounds.consume_samples(now)) is None:
            return False
        step, figures = sample
        self._compare(now, step, list(figures), np.stack(list(figures.values())))
        return True

    def _compare(self, now: float, step: int, layers: Sequence[str], values: FloatArray) -> None:
        members = [one for _, one in sorted(self._membership.contributors.items())]
        if len(members) < self._membership.world_size:
            return
        with suppress(LimitExceeded):  # without memory the step is skipped
            self._memory.check(self.comparison.growth(layers))
            for found in self.comparison.add(now, step, layers, values):
                text = found.describe([str(member) for member in members])[:MAX_TEXT_LENGTH]
                rank = members[found.member].member
                self.findings.add(Finding("skew", rank, step, text, found.layer, found.numbers, found))


def _late(slow: Contributor) -> dict[str, float]:
    """How late a straggler was in the rounds where it was last; empty after few of them."""
    if slow.lateness.total < MIN_ROUNDS:
        return {}
    return {"median": slow.lateness.quantile(0.5), "p99": slow.lateness.quantile(0.99)}


def _describe_straggler(slow: Contributor, part: float, late: Mapping[str, float]) -> str:
    """Text of a straggler finding; `part` is the share of the last minute that the others waited for it."""
    text = f"{slow}: the others waited {percent(part)} of the last minute for it"
    if not late:
        return text
    return f"{text}; when last it was {duration(late['median'])} late (median), {duration(late['p99'])} (p99)"
