"""Sighting: where a member was when it was last asked, because others wait for it.

A member is asked more than once, so a sighting also says how long it has been in that place. Nothing here is trusted:
the text of a member is for people, and its numbers only decide about members that wait anyhow.
"""

from dataclasses import dataclass, field, replace

from statsd_bn.members import NOBODY
from statsd_bn.messages import StackReport
from statsd_bn.text import plain

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
