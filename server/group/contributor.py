"""Contributor: a member that is registered in a group, and where it was when it was last asked.

A member is asked while others wait for it, more than once, so a sighting also says how long it has been in that place.
Nothing of it is trusted: the text is for people, and the numbers only decide about members that wait anyhow.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from server.group.lifecycle import MemberState
from statsd_bn.members import NOBODY
from statsd_bn.messages import Register, StackReport
from statsd_bn.round_key import RoundKey
from statsd_bn.text import plain
from statsd_bn.timing import Histogram

# The first question comes after a wait of this length, the next after as long again, and then at doubling intervals, up
# to the second number.
ASK_SECONDS, ASKED_AT_MOST = 1.0, 32.0

# A heartbeat thread answers within milliseconds. One that has not for this long cannot: its process is stopped or
# starved, or a thread of it keeps the interpreter's lock.
SILENT_SECONDS = 1.0

# Two answers that are this far apart and say the same mean that a member waits, and is not merely passing through.
STEADY_SECONDS = 1.0

# Process groups that are remembered for one member: it is asked for one or two.
MOST_GROUPS = 8

# Runs of ranks in a process group that is remembered: every eighth of 1,024 ranks are so many, and take 15 KB. What a
# member tells of another process group is dropped, since it is in nobody's account.
MOST_RUNS = 128


@dataclass(slots=True)
class Launched:
    """How many operations a member has begun on a process group of torch: the number, and since when it is that."""

    number: int
    since: float
    seen: float


@dataclass(slots=True)
class Sighting:
    """What is known of where a member is.

    Attributes:
        due: when to ask it next.
        number: of the latest question.
        times: how often it was asked.
        pause: how long after the next question the one after that comes, in seconds.
        asked: when the first question was asked that it has not answered; None where it has answered the latest.
        latest: its latest answer.
        since: when it gave the first answer that says the same as the latest.
        seen: when it gave the latest.
        launched: by process group of torch, as `group_of` has it.
    """

    due: float
    number: int = 0
    times: int = 0
    pause: float = ASK_SECONDS
    asked: float | None = None
    latest: StackReport | None = None
    since: float = 0.0
    seen: float = 0.0
    launched: dict[int, Launched] = field(default_factory=dict)

    def ask(self, now: float, number: int) -> None:
        """Note that a question leaves now."""
        self.number, self.times = number, self.times + 1
        self.asked = now if self.asked is None else self.asked
        self.due, self.pause = now + self.pause, min(2 * self.pause, ASKED_AT_MOST)

    def take(self, now: float, answer: StackReport) -> None:
        """Note an answer; an old one, or one to no question, is ignored."""
        if self.asked is None or answer.number != self.number:
            return
        self.asked = None
        if len(answer.members.runs) > MOST_RUNS:
            answer = replace(answer, torch_group="", members=NOBODY, launched=0)
        if self.latest is None or _place(answer) != _place(self.latest):
            self.since = now
            self.launched.clear()  # it has moved, so these numbers are old
        self.latest, self.seen = answer, now
        if answer.torch_group:
            self._count(now, group_of(answer), answer.launched)

    @property
    def is_held(self) -> bool:
        """Whether the member waits in a collective of torch, and has not moved between two questions."""
        latest = self.latest
        return bool(latest and latest.held and latest.torch_group) and self.seen - self.since >= STEADY_SECONDS

    def has_launched(self, group: int, at_least: int) -> bool | None:
        """Whether the member has begun so many operations on a process group; None if nobody knows, or it changes."""
        known = self.launched.get(group)
        if known is None:
            return None
        if known.number >= at_least:
            return True
        return False if known.seen - known.since >= STEADY_SECONDS else None

    def steady_in(self, group: int) -> tuple[float, float]:
        """From when to when neither its place nor its number of operations on a process group is known to change."""
        known = self.launched.get(group)
        return (max(self.since, known.since), known.seen) if known else (self.seen, self.seen)

    def told(self, now: float) -> str:
        """Where it is, for people, to follow its name; empty while nothing is known."""
        if self.asked is not None and now - self.asked >= SILENT_SECONDS:
            return f"does not answer when asked where it is, for {now - self.asked:.0f} s"
        if self.latest is None:
            return ""
        place = plain(self.latest.stack) or ("a collective of torch" if self.latest.held else "")
        return f"is in {place}, for {now - self.since:.0f} s" if place else ""

    def _count(self, now: float, group: int, number: int) -> None:
        known = self.launched.get(group)
        if known and known.number == number:
            known.seen = now
            return
        if len(self.launched) >= MOST_GROUPS:
            self.launched.clear()
        self.launched[group] = Launched(number, now, now)


def group_of(answer: StackReport) -> int:
    """What the process group that a member tells of is known by: one number for its name and its ranks."""
    return hash((answer.torch_group, answer.members))


def _place(answer: StackReport) -> tuple[object, ...]:
    # Of a member that waits in a collective the number of operations is part of the place: a loop comes to the same
    # line again. One that was asked about another group waits in a round.
    return (answer.stack, answer.held, *((answer.torch_group, answer.launched) if answer.held else ()))


@dataclass(slots=True)
class Contributor:
    """A member that is registered in a group.

    Attributes:
        session: the life of the process that registered.
        member: its number in the job.
        deadline: how long its rounds may stay open, in seconds.
        place: where it runs, for people.
        peer: whom to answer.
        step: the step it is in, by its contributions.
        first_step: the first step it takes part in.
        state: whether it takes part, see `server.group.lifecycle`.
        has_past: whether it was in the group when that was open in an earlier life of the server.
        owed: how many results of that life it has announced.
        replicas: rows in its latest contribution; 0 before the first.
        since: when it registered first, or has come back from a pass over its data.
        transport: how its rows reach the others, as it says; empty while it has not said it.
        told_step: the step it is in, as it says; it may have had rounds of which the server has seen nothing.
        threads: how many rounds it has had under way at once, at most: so many threads of it exchange.
        late: how much later than the first member it has come to its rounds, in seconds altogether.
        waited: how long it has waited in rounds of which the server saw nothing, in seconds, as it says.
        behind: how much later than all others it has come, each time that it came last, here and in memory.
        told_behind: the same in memory, as it says.
        trips: how long its rounds took, as it says.
        recalled: the rounds whose results have come.
        sighting: where it was when it was asked; None while nobody waits for it.
    """

    session: bytes
    member: int
    deadline: float
    place: str
    peer: bytes
    step: int
    first_step: int
    state: MemberState
    has_past: bool
    owed: int
    recalled: set[RoundKey] = field(default_factory=set)
    replicas: int = 0
    since: float = 0.0
    transport: str = ""
    told_step: int = 0
    threads: int = 1
    late: float = 0.0
    waited: float = 0.0
    behind: Histogram = field(default_factory=Histogram)
    told_behind: Histogram = field(default_factory=Histogram)
    trips: Histogram = field(default_factory=Histogram)
    sighting: Sighting | None = None

    def __str__(self) -> str:
        return f"rank {self.member} ({self.place})"

    def learn_past(self, register: Register) -> None:
        """Take what it says of an earlier life of the server, which it did not know of when it registered first."""
        self.has_past = True
        self.owed, self.step, self.first_step = register.results, register.step, register.first_step

    @property
    def has_begun(self) -> bool:
        """Whether it has taken part in a round of an earlier life of the server, or in some of this one."""
        return self.step > 0 or self.owed > 0

    @property
    def owes(self) -> bool:
        """Whether results that it has announced are still to come; they may have been lost on the way."""
        return len(self.recalled) < self.owed

    def where(self, now: float) -> str:
        """Where it is, to follow its name; empty while nothing is known."""
        return self.sighting.told(now) if self.sighting else ""

    @property
    def place_in_code(self) -> str:
        """The place that it has answered with; empty while nothing is known."""
        return plain(self.sighting.latest.stack) if self.sighting and self.sighting.latest else ""

    @property
    def known_step(self) -> int:
        """The latest step that it is known to have been in."""
        return max(self.step, self.told_step)

    def _late(self) -> dict[str, Any]:
        """How often it came last, and by how much."""
        last = self.behind.total
        return {"last": last, "late": _in_brief(self.behind)} if last else {}

    def report(self, now: float, step: int) -> dict[str, Any]:
        """Entry of the status report; `step` is the one that the member is in."""
        where = self.where(now)
        return {
            "member": self.member,
            "place": self.place,
            "participation": self.state.name.lower(),
            "step": step,
            "replicas": self.replicas,
            **self._late(),
            **({"round_trip": _in_brief(self.trips)} if self.trips.total else {}),
            **({"transport": self.transport} if self.transport else {}),
            **({"where": where} if where else {}),
        }


def _in_brief(times: Histogram) -> dict[str, float]:
    return {"median": times.quantile(0.5), "p99": times.quantile(0.99)}
