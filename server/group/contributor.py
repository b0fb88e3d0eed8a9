"""Contributor: a registered member of a group, and its latest stack sample.

The server requests stack reports from late members at intervals, so a sample also shows how long a member has been in
one position. Reports are not trusted: the text is for display, and the numbers affect only members that wait anyway.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from server.group.lifecycle import MemberState
from statsd_bn.members import NO_MEMBERS
from statsd_bn.messages import StackReport
from statsd_bn.round_key import RoundKey
from statsd_bn.text import escape
from statsd_bn.timing import Histogram, quantile

# The server sends the first request after a wait of ASK_SECONDS, the second ASK_SECONDS later, and further requests at
# intervals that double up to ASKED_AT_MOST.
ASK_SECONDS, ASKED_AT_MOST = 1.0, 32.0

# A member's heartbeat thread answers within milliseconds. If it does not answer for this long, the process is stopped
# or starved, or another thread holds the GIL.
SILENT_SECONDS = 1.0

STEADY_SECONDS = 1.0  # two equal reports this far apart show that a member waits in that position
MAX_PROCESS_GROUPS = 8  # limit on a member's stored operation counts; requests name one or two groups

# Runs of ranks in a reported process group: ranks 0, 8, 16 and so on of 1,024 are 128 runs, of 15 kB. The server drops
# a report's process group with more runs, because the quota does not count this memory.
MOST_RUNS = 128


class LaunchCount(NamedTuple):
    """Operations that a member has launched on a process group, and when a report first and last had this number."""

    number: int
    since: float
    seen: float


@dataclass(slots=True)
class StackSample:
    """Stack reports of one member."""

    due: float  # time of the next request
    number: int = 0  # id of the latest request
    requests: int = 0
    interval: float = ASK_SECONDS  # seconds between the next request and the one after it
    unanswered_since: float | None = None  # time of the first unanswered request; None if the latest is answered
    latest: StackReport | None = None
    since: float = 0.0  # time of the first report equal to the latest
    seen: float = 0.0  # time of the latest report
    launched: dict[int, LaunchCount] = field(default_factory=dict)  # by process group, see `group_of`

    def record_request(self, now: float, number: int) -> None:
        """Record a request that is sent now."""
        self.number, self.requests = number, self.requests + 1
        self.unanswered_since = now if self.unanswered_since is None else self.unanswered_since
        self.due, self.interval = now + self.interval, min(2 * self.interval, ASKED_AT_MOST)

    def record_report(self, now: float, answer: StackReport) -> None:
        """Record a report; outdated and unrequested ones are ignored."""
        if self.unanswered_since is None or answer.number != self.number:
            return
        self.unanswered_since = None
        if len(answer.members.runs) > MOST_RUNS:
            answer = replace(answer, torch_group="", members=NO_MEMBERS, launched=0)
        if self.latest is None or _position(answer) != _position(self.latest):
            self.since = now
            self.launched.clear()  # the counts are outdated, since the member has moved
        self.latest, self.seen = answer, now
        if answer.torch_group:
            before = self.launched.pop(group_of(answer), LaunchCount(answer.launched, now, now))
            if len(self.launched) >= MAX_PROCESS_GROUPS:
                self.launched.clear()
            since = before.since if before.number == answer.launched else now
            self.launched[group_of(answer)] = LaunchCount(answer.launched, since, now)

    @property
    def blocked_in(self) -> StackReport | None:
        """Report of the torch collective in which the member is blocked, if two reports agree."""
        is_steady = self.seen - self.since >= STEADY_SECONDS
        latest = self.latest if is_steady else None
        return latest if latest and latest.in_collective and latest.torch_group else None

    def has_launched(self, group: int, at_least: int) -> bool | None:
        """Whether the member has launched `at_least` or more operations on a process group; None if unknown."""
        known = self.launched.get(group)
        if known and known.number >= at_least:
            return True
        return False if known and known.seen - known.since >= STEADY_SECONDS else None

    def steady_period(self, group: int) -> tuple[float, float]:
        """Start and end of the time in which the member's position and its count for a process group were constant."""
        known = self.launched.get(group)
        return (max(self.since, known.since), known.seen) if known else (self.seen, self.seen)

    def describe(self, now: float) -> str:
        """Text such as "is in train.py:9 load, for 3 s", or that no answer came; empty without a report or request."""
        if self.unanswered_since is not None and now - self.unanswered_since >= SILENT_SECONDS:
            return f"has not answered a stack request for {now - self.unanswered_since:.0f} s"
        if self.latest is None:
            return ""
        position = escape(self.latest.stack) or ("a collective of torch" if self.latest.in_collective else "")
        return f"is in {position}, for {now - self.since:.0f} s" if position else ""


def group_of(answer: StackReport) -> int:
    """Key of the process group in a report: a hash of its name and ranks."""
    return hash((answer.torch_group, answer.members))


def _position(answer: StackReport) -> tuple[object, ...]:
    # The operation count is part of a position in a collective, because a loop returns to the same line. Outside of a
    # collective the report may have the count of the process group in which another member is blocked.
    operation = (answer.torch_group, answer.launched) if answer.in_collective else ()
    return (answer.stack, answer.in_collective, *operation)


@dataclass(slots=True)
class Contributor:
    """A registered member. Its process measures the fields marked "as reported": some rounds bypass the server."""

    session: bytes
    member: int  # its rank in the job
    deadline: float  # seconds that its rounds may stay open
    place: str  # host and process, for display
    peer: bytes  # routing id for replies
    step: int  # of its latest contribution
    first_step: int  # first step with its contributions
    state: MemberState
    was_in_group: bool  # in the open group before a server restart
    announced_results: int  # number of results that it will resend after the restart
    recovered: set[RoundKey] = field(default_factory=set)  # rounds of the results that it has resent
    replicas: int = 0  # rows of its latest contribution
    since: float = 0.0  # time of its registration, or of its return from a pass over its data
    transport: str = ""  # as reported; empty before the first heartbeat
    reported_step: int = 0
    threads: int = 1  # maximum number of its concurrent rounds, and so of its exchanging threads
    delay: float = 0.0  # total seconds from the first member's contribution to its own, over its rounds
    waited: float = 0.0  # total seconds of waiting in rounds that the server did not see, as reported
    total_wait: float | None = None  # seconds waited by the end of the latest window of `Pace`; None if it joined later
    least_computing: float = math.inf  # seconds of computation per round in its fastest window
    # For the report, of the latest complete window (or the first one so far): "waiting", the share of the time that it
    # waited, and "score", the lower of its speeds relative to the fastest member and to its own best window.
    pace: dict[str, float] = field(default_factory=dict)
    lateness: Histogram = field(default_factory=Histogram)  # gaps to the previous member, in rounds where it came last
    reported_lateness: Histogram = field(default_factory=Histogram)  # the part of `lateness` in shared memory
    round_trips: Histogram = field(default_factory=Histogram)  # durations of its rounds, as reported
    stack_sample: StackSample | None = None  # None while it gets no requests

    def __str__(self) -> str:
        return f"rank {self.member} ({self.place})"

    @property
    def has_started(self) -> bool:
        """Whether it is past step 0, or has announced results of rounds before a server restart."""
        return self.step > 0 or self.announced_results > 0

    @property
    def results_pending(self) -> bool:
        """Whether announced results are missing; they may have been lost in transit."""
        return len(self.recovered) < self.announced_results

    def position(self, now: float) -> str:
        """Text about its position in the code, see `StackSample.describe`."""
        return self.stack_sample.describe(now) if self.stack_sample else ""

    @property
    def stack(self) -> str:
        """The stack in its latest report; empty without one."""
        return escape(self.stack_sample.latest.stack) if self.stack_sample and self.stack_sample.latest else ""

    def report(self, now: float, step: int) -> dict[str, Any]:
        """Entry of the status report; `step` is the member's current step."""
        where, last = self.position(now), self.lateness.total
        return {
            "member": self.member,
            "place": self.place,
            "participation": self.state.name.lower(),
            "step": step,
            "replicas": self.replicas,
            **({"last": last, "late": percentiles(self.lateness)} if last else {}),
            **({"round_trip": percentiles(self.round_trips)} if self.round_trips.total else {}),
            **({"transport": self.transport} if self.transport else {}),
            **({"where": where} if where else {}),
            **self.pace,
        }


def percentiles(times: Histogram) -> dict[str, float]:
    """Report entry of durations."""
    return {"median": quantile(times.counts, 0.5), "p99": quantile(times.counts, 0.99)}
