"""Contributor: a member that is registered in a group."""

from dataclasses import dataclass, field
from typing import Any

from server.membership.life import MemberState
from server.membership.sighting import Sighting
from statsd_bn.messages import Register
from statsd_bn.round_key import RoundKey
from statsd_bn.text import plain
from statsd_bn.timing import Histogram


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
        state: whether it takes part, see `server.membership.life`.
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
