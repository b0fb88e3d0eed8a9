"""Health of a group: round durations, stragglers, differences between the members' data, and non-finite values.

In each round a member waits from its contribution to the answer, and between two rounds it computes. The slowest member
waits least, so the delay that it causes is the least wait among the others minus its own wait. If all ranks are late
equally often, their waits are equal and none is reported. This needs one sum per member, and also covers rounds that
bypass the server: for these the members report their own waits.
"""

import logging
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from server.group.contributor import Contributor, percentiles
from server.group.membership import Membership
from server.group.rounds import Round
from server.security.quota import MemoryShare
from statsd_bn.errors import LimitExceeded, ProtocolError
from statsd_bn.members import MAX_NAMED_RANKS, Members, format_ranks
from statsd_bn.messages import LatenessReport, RoundTrips, SkewStats
from statsd_bn.reduction import FloatArray, is_finite
from statsd_bn.round_key import FORWARD, RoundKey, format_first_non_finite
from statsd_bn.skew import Finding, SkewDetector
from statsd_bn.skew_samples import SCHEDULED_BYTES, VECTORS, SkewSampler, figures_of_step
from statsd_bn.text import duration, percent
from statsd_bn.timing import Histogram

logger = logging.getLogger("statsd_bn.server")

# Length of a window, and the share of it by which one member may delay the others.
WINDOW_SECONDS, MAX_DELAY_SHARE = 60.0, 0.1

RESET_SHARE = MAX_DELAY_SHARE / 2  # a straggler is reported once, and again only after a window below this share
STARTUP_SECONDS = 30.0  # the first steps compile, tune kernels and fill caches, at a different speed on each rank
SO_FAR_SECONDS = 10.0  # interval of checks of the first window before its end
MIN_ROUNDS = 100  # percentiles over fewer rounds mean little
MAX_FINDINGS, MAX_FINDING_LENGTH = 8, 512  # findings kept, and characters of their texts
MAX_SAMPLE_BYTES = 2**18  # for the sampled rows of one step; larger steps keep fewer channels and layers
MAX_NON_FINITE_LENGTH = 1024  # characters of a text about non-finite values: a report contains up to two

# A GradScaler starts at 2^16 and halves its scale after each overflow. A longer series of steps with non-finite
# gradients has another cause.
MAX_OVERFLOWS = 20

# The text of `NonFiniteChannels`, which members send; numbers of at most seven digits.
_CHANNELS = re.compile(r"(\d{1,7}) of (\d{1,7}) channels \(([a-zA-Z ]{1,16})\)")


class Pace:
    """Speed of a group's members, window by window; all measurements are shares from 0 to 1."""

    def __init__(self) -> None:
        # Of the latest complete window, or of the first one so far:
        self.seconds = 0.0  # its length
        self.slowest: int | None = None  # the member that waited least; None with fewer than two members
        self.delay = 0.0  # share of the time that the others waited for the slowest
        self._due = math.inf  # end of the current window
        self._rounds = 0  # at the start of the current window
        self._look = math.inf  # the next check of the first window, before its end
        self._is_reported = False  # the slowest member was reported, and has not recovered since

    def update(self, now: float, rounds: int, longest: float, contributors: Mapping[int, Contributor]) -> bool:
        """End the current window if it is due; returns whether to report the slowest member.

        `longest` is the sum of all rounds' durations. The first window starts STARTUP_SECONDS after the first round.
        """
        if self._due == math.inf and rounds:
            self._due = now + STARTUP_SECONDS
            self._look = self._due + SO_FAR_SECONDS
        seconds, had = WINDOW_SECONDS + now - self._due, rounds - self._rounds
        is_over = now >= self._due
        if not is_over and now < self._look:
            return False
        shares: dict[int, float] = {}
        for member, one in contributors.items():
            # In each round the first member waits for the duration, each other member for the duration minus its delay.
            before, total = one.total_wait, longest - one.delay + one.waited
            if is_over:
                one.total_wait = total
            if had and before is not None:
                shares[member] = min(1.0, max(0.0, total - before) / seconds)
        self._compare(shares, seconds, contributors)
        if not is_over:
            self._look = now + SO_FAR_SECONDS
            return False
        if shares:
            self._look = math.inf
        self._due, self._rounds = now + WINDOW_SECONDS, rounds
        # Seconds of computation per round; never 0, because it is a divisor.
        computing = {member: max(1e-9, (1 - share) * seconds / had) for member, share in shares.items()}
        fastest = min(computing.values(), default=0.0)
        for member, own in computing.items():
            one = contributors[member]
            one.least_computing = min(one.least_computing, own)
            one.pace["score"] = min(fastest, one.least_computing) / own
        self._is_reported = self._is_reported and self.delay >= RESET_SHARE
        is_news = self.delay >= MAX_DELAY_SHARE and not self._is_reported
        self._is_reported |= is_news
        return is_news

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the slowest member is first known; None if it is known, or before the first round."""
        return max(0.0, self._look - now) if self.slowest is None and self._look < math.inf else None

    def _compare(self, shares: Mapping[int, float], seconds: float, contributors: Mapping[int, Contributor]) -> None:
        """Find the slowest member by the shares of the time that members waited."""
        self.slowest, self.delay, self.seconds = None, 0.0, seconds
        for member, one in contributors.items():
            one.pace = {"waiting": shares[member]} if member in shares else {}
        if len(shares) > 1:
            self.slowest, second = sorted(shares, key=lambda member: shares[member])[:2]
            self.delay = shares[second] - shares[self.slowest]


class GroupHealth:
    """Health of one epoch of a group."""

    def __init__(self, membership: Membership, memory: MemoryShare) -> None:
        self._membership = membership
        self._memory = memory
        self._samples = SkewSampler(MAX_SAMPLE_BYTES)
        # Report entries, each with the difference that it reports, if any.
        self._findings: deque[tuple[dict[str, Any], Finding | None]] = deque(maxlen=MAX_FINDINGS)
        self.pace = Pace()
        self.comparison = SkewDetector(membership.world_size)
        self.non_finite = FirstNonFinite()
        self.durations = Histogram()  # of the rounds that ended with their last contribution
        self.lateness = Histogram()  # gaps between the last two contributions, in shared memory too
        self.round_trips = Histogram()  # of all members, as reported

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Report entries of the latest findings, oldest first."""
        is_current = self.comparison.is_current
        return [
            {**entry, "cleared": True} if skew and not is_current(skew) else entry for entry, skew in self._findings
        ]

    def record_round(self, now: float, round_: Round, last: Contributor) -> None:
        """Record a round that ends with its last contribution."""
        self.durations.add(now - round_.opened)
        last.lateness.add(round_.gap)
        self.lateness.add(round_.gap)
        if self._samples.is_due(now, round_.key):
            self._sample(now, round_)

    def add_latency(self, contributor: Contributor, report: RoundTrips | LatenessReport) -> None:
        """Add a member's round trips, or its lateness in shared memory.

        Reports are cumulative, so a report with lower counts than the previous report is outdated.
        """
        if isinstance(report, RoundTrips):
            before, everywhere = contributor.round_trips, [self.round_trips]
        else:
            before, everywhere = contributor.reported_lateness, [contributor.lateness, self.lateness]
        seconds = report.microseconds / 1e6
        if seconds < before.sum or any(new < old for new, old in zip(report.counts, before.counts, strict=True)):
            return
        for counted in (*everywhere, before):
            counted.add_growth(tuple(before.counts), report.counts, seconds - before.sum)

    def update_pace(self, now: float, rounds: int) -> None:
        """End the current window if it is due, and report a straggler."""
        pace, contributors = self.pace, self._membership.contributors
        if not pace.update(now, rounds, self.durations.sum, contributors):
            return
        slow = contributors[pace.slowest or 0]
        text = f"{slow}: the others waited {percent(pace.delay)} of the last minute for it"
        late: dict[str, float] = {}
        if slow.lateness.total >= MIN_ROUNDS:
            late = percentiles(slow.lateness)
            text += f"; its delay when it came last: median {duration(late['median'])}, p99 {duration(late['p99'])}"
        self._add("straggler", slow.member, self._membership.step_of(slow), text, late)

    def add_skew(self, now: float, report: SkewStats) -> None:
        """Add skew figures of rounds that bypassed the server."""
        members, is_elastic = self._membership.world_size, self._membership.is_elastic
        if is_elastic or report.values.shape[1] != members:
            raise ProtocolError(
                f"skew: expected the figures of the {members} members of a strict group, "
                f"got {report.values.shape[1]}{' of an elastic one' if is_elastic else ''}"
            )
        self._compare(now, report.step, report.names, report.values)

    def compare_samples(self, now: float) -> bool:
        """Compare the members' data in a sampled step; returns False without a sampled step."""
        before = self._samples.size
        samples = self._samples.drain(now)
        self._memory.adjust(self._samples.size - before)
        if (sample := figures_of_step(samples)) is None:
            return False
        step, figures = sample
        self._compare(now, step, list(figures), np.stack(list(figures.values())))
        return True

    def _sample(self, now: float, round_: Round) -> None:
        """Sample finite rows of a layer for the skew figures if all members of a strict group have contributed."""
        membership, samples = self._membership, self._samples
        # Skew needs two members.
        if membership.is_elastic or round_.nr_missing or len(round_.futures) < max(2, membership.world_size):
            return
        rows = [future.get() for future in round_.futures.values()]
        if rows[0].values.shape[1] != VECTORS:
            return
        before = samples.size
        with suppress(LimitExceeded):  # without memory the round is not sampled
            self._memory.check(MAX_SAMPLE_BYTES + SCHEDULED_BYTES)
            stride = samples.stride(sum(one.values.nbytes for one in rows))
            values = np.concatenate([one.values[..., ::stride] for one in rows])
            if is_finite(values):
                counts = [count for one in rows for count in one.counts]
                samples.observe(now, round_.key, counts, [len(one.counts) for one in rows], values)
            self._memory.adjust(samples.size - before)

    def _compare(self, now: float, step: int, layers: Sequence[str], values: FloatArray) -> None:
        members = [one for _, one in sorted(self._membership.contributors.items())]
        if len(members) < self._membership.world_size:
            return
        with suppress(LimitExceeded):  # without memory the step is skipped
            self._memory.check(self.comparison.growth(layers))
            for found in self.comparison.add(now, step, layers, values):
                text = found.describe([str(member) for member in members])
                self._add("skew", members[found.member].member, step, text, found.numbers, found)

    def _add(
        self, kind: str, rank: int, step: int, text: str, numbers: dict[str, Any], skew: Finding | None = None
    ) -> None:
        """Store a finding about a member, with further numbers for the report, and log it as a warning."""
        text, layer = text[:MAX_FINDING_LENGTH], skew.layer if skew else ""
        entry = {"kind": kind, "rank": rank, "step": step, "text": text, "layer": layer, **numbers}
        self._findings.append((entry, skew))
        logger.warning("%s: %s: %s", self._membership.name, kind, text)


class FirstNonFinite:
    """The origin of a group's first NaN or infinity in one epoch, forward and backward, for log and status.

    A GradScaler raises its scale until gradients overflow, and skips a step in which they do. So non-finite gradients
    are reported only if the forward pass, the end of the group or a long series of steps shows another cause.
    """

    def __init__(self) -> None:
        self._found: dict[bool, tuple[str, dict[str, Any]]] = {}  # text and facts, for forward and backward
        # The latest step with non-finite gradients, and the number of such steps in a row.
        self._step, self._in_a_row = -1, 0

    def report(self, step: int, *, is_broken: bool) -> dict[str, Any]:
        """Report entries: the texts in order of discovery, and the first one's facts; none for harmless overflows."""
        has_ended_it = is_broken and step <= self._step + 1
        is_finding = True in self._found or has_ended_it or self._in_a_row > MAX_OVERFLOWS
        found = list(self._found.values()) if is_finding else []
        return {"non_finite": [text for text, _ in found], **({"first_non_finite": found[0][1]} if found else {})}

    def record(self, key: RoundKey, bearers: Members, what: str, contributors: Mapping[int, Contributor]) -> None:
        """Record a non-finite round; only the first in each direction is kept."""
        is_forward = key.is_forward
        if not is_forward:
            self._count(key.step)
        if is_forward in self._found:
            return
        there = (contributors[member] for member in islice(bearers, MAX_NAMED_RANKS) if member in contributors)
        who = format_ranks(bearers, {contributor.member: contributor.place for contributor in there})
        text = format_first_non_finite(key, who, what)[:MAX_NON_FINITE_LENGTH]
        number, channels, kinds = counted.groups() if (counted := _CHANNELS.match(what)) else (0, 0, "")
        facts = {
            "layer": key.layer,
            "phase": FORWARD if is_forward else key.phase,
            "step": key.step,
            "ranks": list(islice(bearers, MAX_NAMED_RANKS)),
            **({"ranks_left_out": more} if (more := len(bearers) - MAX_NAMED_RANKS) > 0 else {}),
            "channels": int(number),
            "of": int(channels),
            "what": kinds,
        }
        self._found[is_forward] = text, facts
        if is_forward:
            # Earlier non-finite gradients were no harmless overflow, so they are a warning too.
            for found, _ in self._found.values():
                logger.warning("job %r, group %r: %s", key.job, key.group, found)
        else:
            logger.info("job %r, group %r: %s", key.job, key.group, text)

    def _count(self, step: int) -> None:
        """Count consecutive steps with non-finite gradients; a step may have many such rounds."""
        if step != self._step:
            self._in_a_row = self._in_a_row + 1 if step == self._step + 1 else 1
            self._step = step
