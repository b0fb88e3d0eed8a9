"""Who belongs to a group, whether it lives, where it is, and how it leaves."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from statsd_bn import limits
from statsd_bn.checks import Checked, Counter, Name, Token, check_integer, integer_in, shown, text_within
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NOBODY, Members, ranks_in_words

# The group of all members of a job; they are numbered from 0.
WORLD = "world"

# Kinds of torch's collectives of which it is known when they end: the first three end on all ranks at about the same
# time, and the last is what DistributedDataParallel begins a forward pass with.
BARRIER, ALL_REDUCE, ALL_GATHER, BUFFERS = "barrier", "all_reduce", "all_gather", "buffers"

# What a member says that has not met a server yet.
NO_SERVER = bytes(limits.TOKEN_BYTES)


class Participation(IntEnum):
    """Whether a member takes part in the rounds of its group.

    PAUSED: rounds go on without it, because its data has ended. REJOINING: it waits until all others rejoin too.
    """

    TAKES_PART = 0
    PAUSED = 1
    REJOINING = 2


_PARTICIPATIONS = tuple(participation.value for participation in Participation)


@dataclass(frozen=True, slots=True)
class Register(Checked):
    """A member says who it is and what it knows, to belong to a group; sent again, it asks again how the group stands.

    Attributes:
        session: who speaks; drawn anew for each life of a member in a group.
        group: the members of the job that synchronise together.
        epoch: one life of the group's membership.
        member: its number in the job, the same in all its groups.
        world_size: how many members the group begins with.
        min_members: how few of them may go on when others are lost; 0: none may, the group is strict.
        deadline: seconds that a round opened by this member may stay open.
        place: host and process, for people.
        stand: whether it takes part in the group's rounds.
        step: the step it is in.
        first_step: the first step that it takes part in, as it was told.
        results: how many `Result`s it can tell a server that does not know it.
        known: the members of the group, as it last heard of them.
    """

    type: ClassVar[int] = 1

    session: Token
    job: Name
    group: Name
    epoch: Counter
    member: Annotated[int, integer_in(0, limits.MAX_MEMBERS - 1)]
    world_size: Annotated[int, integer_in(1, limits.MAX_MEMBERS)]
    min_members: int
    deadline: float
    place: Name
    participation: Annotated[int, integer_in(_PARTICIPATIONS[0], _PARTICIPATIONS[-1])] = Participation.TAKES_PART.value
    server: Token = NO_SERVER
    step: Counter = 0
    first_step: Counter = 0
    results: Annotated[int, integer_in(0, limits.KEPT_ROUNDS)] = 0
    known: Members = NOBODY

    @property
    def has_past(self) -> bool:
        """Whether the member has been in the group when that was open."""
        return self.server != NO_SERVER and bool(self.known.runs)

    @property
    def has_begun(self) -> bool:
        """Whether the member has been given a result, or is beyond the first step."""
        return self.step > 0 or self.results > 0

    def _check(self) -> None:
        check_integer("min_members", self.min_members, 0, self.world_size)
        if type(self.deadline) is not float or not 0 < self.deadline <= limits.MAX_DEADLINE:
            raise ProtocolError(
                f"deadline: expected seconds in (0, {limits.MAX_DEADLINE:g}], got {shown(self.deadline)}"
            )


@dataclass(frozen=True, slots=True)
class Registered(Checked):
    """The server knows the member, and says whether the group is open.

    Attributes:
        digest: of the session whose registration it answers, see `statsd_bn.tokens`. Not the session itself: the
            answer may reach somebody else.
        missing: how many members the group still waits for; 0: it is open.
    """

    type: ClassVar[int] = 2

    digest: Token
    server: Token
    epoch: Counter
    first_step: Counter
    missing: Annotated[int, integer_in(0, limits.MAX_MEMBERS)]
    present: Members


@dataclass(frozen=True, slots=True)
class Leave(Checked):
    """A member leaves its group. `cause` is empty for an orderly end, else what went wrong."""

    type: ClassVar[int] = 5

    session: Token
    cause: Annotated[str, text_within(limits.MAX_TEXT_BYTES)]


@dataclass(frozen=True, slots=True)
class Heartbeat(Checked):
    """A member that has nothing else to say is alive. It has no answer, unless the session is unknown.

    Attributes:
        rounds: how many rounds it has had with the other members alone, of which the server has seen nothing.
        transport: how its rows reach the others, for people; empty while that is not known.
        why: why they do not take a faster way, for people; empty if they take the fastest, or nobody knows.
        waited: for how many milliseconds it has waited in rounds with the others alone.
    """

    type: ClassVar[int] = 9

    session: Token
    step: Counter = 0
    rounds: Counter = 0
    transport: Annotated[str, text_within(limits.MAX_PHASE_BYTES)] = ""
    why: Annotated[str, text_within(limits.MAX_NAME_BYTES)] = ""
    waited: Counter = 0


@dataclass(frozen=True, slots=True)
class StackRequest(Checked):
    """The server asks a member that others wait for where it is; it goes to where the member's heartbeats come from.

    Attributes:
        digest: of the session that is asked.
        number: of the question; the answer repeats it.
        torch_group: the name of the process group of torch that the answer is to tell of; empty: the group of the
            collective that the member is in.
    """

    type: ClassVar[int] = 12

    digest: Token
    number: Counter
    torch_group: Annotated[str, text_within(limits.MAX_NAME_BYTES)] = ""


@dataclass(frozen=True, slots=True)
class StackReport(Checked):
    """A member's answer to a question: where its main thread is.

    Attributes:
        stack: the files, lines and functions it is in, for people; empty if it does not tell.
        held: 1 if it is inside of a collective of torch, 0 if not.
        torch_group: the name of a process group of torch; empty if it tells of none.
        members: the ranks of that process group.
        launched: how many operations this member has begun on that process group.
        collective: the kind of that collective, such as `BARRIER`; empty if it is another one, or not known.
    """

    type: ClassVar[int] = 13

    session: Token
    number: Counter
    stack: Annotated[str, text_within(limits.MAX_STACK_BYTES)]
    held: Annotated[int, integer_in(0, 1)]
    torch_group: Annotated[str, text_within(limits.MAX_NAME_BYTES)]
    members: Members
    launched: Counter
    collective: Annotated[str, text_within(limits.MAX_NAME_BYTES)] = ""


def missing_members(group: str, size: int, present: Members, missing: int) -> str:
    """Returns in words whom a group still waits for: by number only in the world, where the numbers are known."""
    if group == WORLD and len(present) + missing == size:
        return ranks_in_words(Members.of(set(range(size)).difference(present)))
    besides = f" besides {ranks_in_words(present)}" if present else ""
    return f"{missing} rank{'s' * (missing != 1)}{besides}"
