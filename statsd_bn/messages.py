"""The messages of the protocol, as values that cannot be wrong.

Each message checks itself when it is built, so one that exists is sound, whether the caller built it or
`wire.decode` did. docs/protocol.md describes every field; the order of fields here is their order on the wire.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, get_args

from statsd_bn import limits
from statsd_bn.checks import check_integer, check_name, check_text, check_token, check_values, shown
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NOBODY, Members
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.skew import FIGURES, NUMBERS, check_figures

# The group of all members of a job; they are numbered from 0.
WORLD = "world"

# Kinds of torch's collectives of which it is known when they end: the first three end on all ranks at about the same
# time, and the last is what DistributedDataParallel begins a forward pass with.
BARRIER, ALL_REDUCE, ALL_GATHER, BUFFERS = "barrier", "all_reduce", "all_gather", "buffers"

# What a member says that has not met a server yet.
NO_SERVER = bytes(limits.TOKEN_BYTES)

# On an aggregate that no server has made.
NO_SEAL = bytes(limits.SEAL_BYTES)


class Stand(IntEnum):
    """How a member stands to the rounds of its group.

    It TAKES_PART; it is AWAY, and is left out, because its data has ended; or it is BACK, and waits for all others to
    be back as well.
    """

    TAKES_PART = 0
    AWAY = 1
    BACK = 2


_STANDS = tuple(stand.value for stand in Stand)


@dataclass(frozen=True, slots=True)
class Register:
    """A member says who it is and what it knows, to belong to a group; sent again, it asks again how the group stands.

    Attributes:
        session: who speaks; drawn anew for each life of a member in a group.
        job: the training run.
        group: the members of the job that synchronise together.
        epoch: one life of the group's membership.
        member: its number in the job, the same in all its groups.
        world_size: how many members the group begins with.
        min_members: how few of them may go on when others are lost; 0: none may, the group is strict.
        deadline: seconds that a round opened by this member may stay open.
        place: host and process, for people.
        stand: how it stands to the group's rounds.
        server: the life of the server that last took it in.
        step: the step it is in.
        first_step: the first step that it takes part in, as it was told.
        results: how many `Result`s it can tell a server that does not know it.
        known: the members of the group, as it last heard of them.
    """

    type: ClassVar[int] = 1

    session: bytes
    job: str
    group: str
    epoch: int
    member: int
    world_size: int
    min_members: int
    deadline: float
    place: str
    stand: int = Stand.TAKES_PART.value
    server: bytes = NO_SERVER
    step: int = 0
    first_step: int = 0
    results: int = 0
    known: Members = NOBODY

    @property
    def has_past(self) -> bool:
        """Whether the member has been in the group when that was open."""
        return self.server != NO_SERVER and bool(self.known.runs)

    @property
    def has_begun(self) -> bool:
        """Whether the member has been given a result, or is beyond the first step."""
        return self.step > 0 or self.results > 0

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_name("job", self.job, limits.MAX_NAME_BYTES)
        check_name("group", self.group, limits.MAX_NAME_BYTES)
        check_integer("epoch", self.epoch, 0, limits.MAX_COUNTER)
        check_integer("member", self.member, 0, limits.MAX_MEMBERS - 1)
        check_integer("world_size", self.world_size, 1, limits.MAX_MEMBERS)
        check_integer("min_members", self.min_members, 0, self.world_size)
        if type(self.deadline) is not float or not 0 < self.deadline <= limits.MAX_DEADLINE:
            raise ProtocolError(
                f"deadline: expected seconds in (0, {limits.MAX_DEADLINE:g}], got {shown(self.deadline)}"
            )
        check_name("place", self.place, limits.MAX_NAME_BYTES)
        check_integer("stand", self.stand, _STANDS[0], _STANDS[-1])
        check_token("server", self.server)
        check_integer("step", self.step, 0, limits.MAX_COUNTER)
        check_integer("first_step", self.first_step, 0, limits.MAX_COUNTER)
        check_integer("results", self.results, 0, limits.KEPT_ROUNDS)


@dataclass(frozen=True, slots=True)
class Registered:
    """The server knows the member, and says whether the group is open.

    Attributes:
        digest: of the session whose registration it answers, see `statsd_bn.tokens`. Not the session itself: the
            answer may reach somebody else.
        server: the life of the server.
        epoch: of the group.
        first_step: the first step that the member takes part in.
        missing: how many members the group still waits for; 0: it is open.
        present: the members that are there.
    """

    type: ClassVar[int] = 2

    digest: bytes
    server: bytes
    epoch: int
    first_step: int
    missing: int
    present: Members

    def __post_init__(self) -> None:
        check_token("digest", self.digest)
        check_token("server", self.server)
        check_integer("epoch", self.epoch, 0, limits.MAX_COUNTER)
        check_integer("first_step", self.first_step, 0, limits.MAX_COUNTER)
        check_integer("missing", self.missing, 0, limits.MAX_MEMBERS)


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """One member's rows for one round.

    Attributes:
        session: who speaks.
        key: which round.
        attempt: how often it was sent before.
        rows: what its replicas bring.
    """

    type: ClassVar[int] = 3

    session: bytes
    key: RoundKey
    attempt: int
    rows: Rows

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_integer("attempt", self.attempt, 0, limits.MAX_COUNTER)


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """The rows of several members for one round, which one of them brings for all.

    It says what a contribution of each of them would say. Only the one that speaks is answered.

    Attributes:
        session: who speaks.
        sessions: those whose rows they are, one behind the other.
        key: which round.
        rows: of all of them, in the order of `sessions`, as many of each.
    """

    type: ClassVar[int] = 20

    session: bytes
    sessions: bytes
    key: RoundKey
    rows: Rows

    @property
    def tokens(self) -> tuple[bytes, ...]:
        """The sessions, one by one."""
        return _tokens(self.sessions)

    def of(self, session: bytes) -> Contribution:
        """Returns what one of the members would have sent itself; a copy, which does not keep the others' rows."""
        place, replicas = self.tokens.index(session), self.replicas
        part = self.rows.part(place * replicas, replicas)
        return Contribution(session, self.key, 0, Rows(part.counts, part.values.copy()))

    @property
    def replicas(self) -> int:
        """How many rows each of the members brings."""
        return len(self.rows.counts) // len(self.tokens)

    def __post_init__(self) -> None:
        check_token("session", self.session)
        if type(self.sessions) is not bytes:
            raise ProtocolError(f"sessions: expected bytes, got {shown(self.sessions)}")
        tokens = _tokens(self.sessions)
        if len(self.rows.counts) % len(tokens):
            raise ProtocolError(
                f"rows: expected as many of each of {len(tokens)} members, got {len(self.rows.counts)} in all"
            )


# Those of one host are the same in every round. Strangers may name any: 4 kB each time, which no account counts.
@lru_cache(maxsize=1024)
def _tokens(sessions: bytes) -> tuple[bytes, ...]:
    size, most = limits.TOKEN_BYTES, limits.TOKEN_BYTES * limits.MAX_REPLICAS
    tokens = tuple(sessions[start : start + size] for start in range(0, len(sessions), size))
    # No error shows them: they are secrets.
    if not 0 < len(sessions) <= most or len(sessions) % size or len(set(tokens)) < len(tokens):
        raise ProtocolError(
            f"sessions: expected {size} to {most} bytes, {size} for each, all different, got {len(sessions)} bytes"
        )
    return tokens


@dataclass(frozen=True, slots=True, eq=False)
class Aggregate:
    """The sum of all rows of one round, the same bytes for every member.

    Attributes:
        key: the round.
        replicas: how many rows were added.
        count: the sum of their counts.
        members: who contributed them.
        values: shape (vectors, channels), float64: the sum of the rows in replica order; of a gather the rows
            themselves, one behind the other.
        seal: what the server knows its own aggregates by; members keep it and give it back.
        non_finite: who of the members brought NaN or infinity; nobody where all values are finite.
    """

    type: ClassVar[int] = 4

    key: RoundKey
    replicas: int
    count: int
    members: Members
    values: FloatArray
    seal: bytes = NO_SEAL
    non_finite: Members = NOBODY

    def __post_init__(self) -> None:
        check_integer("replicas", self.replicas, 1, limits.MAX_REPLICAS * limits.MAX_MEMBERS)
        check_integer("count", self.count, 0, limits.MAX_COUNT)
        check_values(self.values, 2)
        if type(self.seal) is not bytes or len(self.seal) != limits.SEAL_BYTES:
            raise ProtocolError(f"seal: expected {limits.SEAL_BYTES} bytes, got {shown(self.seal)}")


def sound_aggregate(
    key: RoundKey,
    replicas: int,
    count: int,
    members: Members,
    values: FloatArray,
    non_finite: Members,
    seal: bytes = NO_SEAL,
) -> Aggregate:
    """Returns an aggregate that needs no check: it was made here of rows that have passed theirs, or came before."""
    aggregate = _new(Aggregate)
    _set_key(aggregate, key)
    _set_replicas(aggregate, replicas)
    _set_count(aggregate, count)
    _set_members(aggregate, members)
    _set_values(aggregate, values)
    _set_seal(aggregate, seal)
    _set_non_finite(aggregate, non_finite)
    return aggregate


# What sets the fields of a frozen dataclass.
_new = object.__new__
_set_key, _set_replicas, _set_count, _set_members, _set_values, _set_seal, _set_non_finite = (
    getattr(Aggregate, field.name).__set__ for field in fields(Aggregate)
)


@dataclass(frozen=True, slots=True)
class Leave:
    """A member leaves its group. `cause` is empty for an orderly end, else what went wrong."""

    type: ClassVar[int] = 5

    session: bytes
    cause: str

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_text("cause", self.cause, limits.MAX_TEXT_BYTES, shortest=0)


@dataclass(frozen=True, slots=True)
class Failure:
    """The server's answer when it cannot give what was asked. `key` names the round it is about, if any."""

    type: ClassVar[int] = 6

    code: str
    message: str
    fields: dict[str, Any]
    key: RoundKey | None = None

    def __post_init__(self) -> None:
        check_name("code", self.code, limits.MAX_NAME_BYTES)
        check_text("message", self.message, limits.MAX_TEXT_BYTES, shortest=0)
        if type(self.fields) is not dict or not all(type(name) is str for name in self.fields):
            raise ProtocolError(f"fields: expected a map from names, got {shown(self.fields)}")


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks the server what it is doing. Anybody may ask."""

    type: ClassVar[int] = 7


@dataclass(frozen=True, slots=True)
class Status:
    """What the server is doing: a report as docs/protocol.md describes it."""

    type: ClassVar[int] = 8

    report: dict[str, Any]

    def __post_init__(self) -> None:
        if type(self.report) is not dict:
            raise ProtocolError(f"report: expected a map, got {type(self.report).__name__}")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member that has nothing else to say is alive. It has no answer, unless the session is unknown.

    Attributes:
        session: who is alive.
        step: the step it is in.
        rounds: how many rounds it has had with the other members alone, of which the server has seen nothing.
        lane: how its rows reach the others, for people; empty while that is not known.
        why: why they do not take a faster way, for people; empty if they take the fastest, or nobody knows.
        waited: for how many milliseconds it has waited in rounds with the others alone.
    """

    type: ClassVar[int] = 9

    session: bytes
    step: int = 0
    rounds: int = 0
    lane: str = ""
    why: str = ""
    waited: int = 0

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_integer("step", self.step, 0, limits.MAX_COUNTER)
        check_integer("rounds", self.rounds, 0, limits.MAX_COUNTER)
        check_text("lane", self.lane, limits.MAX_PHASE_BYTES, shortest=0)
        check_text("why", self.why, limits.MAX_NAME_BYTES, shortest=0)
        check_integer("waited", self.waited, 0, limits.MAX_COUNTER)


@dataclass(frozen=True, slots=True)
class Pending:
    """The server's answer to a contribution that is sent again while its round is open.

    Attributes:
        key: the round.
        seconds: how long it has been open, in whole seconds.
        message: who is late, for a person.
        whereabouts: where those are, as they have answered; empty while nothing is known.
    """

    type: ClassVar[int] = 10

    key: RoundKey
    seconds: int
    message: str
    whereabouts: str = ""

    def __post_init__(self) -> None:
        check_integer("seconds", self.seconds, 0, limits.MAX_COUNTER)
        check_text("message", self.message, limits.MAX_TEXT_BYTES)
        check_text("whereabouts", self.whereabouts, limits.MAX_TEXT_BYTES, shortest=0)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a member was given for a round, told to a server that has no memory of it.

    Attributes:
        session: who speaks.
        aggregate: the aggregate that an earlier life of the server gave it.
    """

    type: ClassVar[int] = 11

    session: bytes
    aggregate: Aggregate

    def __post_init__(self) -> None:
        check_token("session", self.session)


@dataclass(frozen=True, slots=True)
class Question:
    """The server asks a member that others wait for where it is; it goes to where the member's heartbeats come from.

    Attributes:
        digest: of the session that is asked.
        number: of the question; the answer repeats it.
        torch_group: the name of the process group of torch that the answer is to tell of; empty: the group of the
            collective that the member is in.
    """

    type: ClassVar[int] = 12

    digest: bytes
    number: int
    torch_group: str = ""

    def __post_init__(self) -> None:
        check_token("digest", self.digest)
        check_integer("number", self.number, 0, limits.MAX_COUNTER)
        check_text("torch_group", self.torch_group, limits.MAX_NAME_BYTES, shortest=0)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A member's answer to a question: where its main thread is.

    Attributes:
        session: who speaks.
        number: of the question.
        stack: the files, lines and functions it is in, for people; empty if it does not tell.
        held: 1 if it is inside of a collective of torch, 0 if not.
        torch_group: the name of a process group of torch; empty if it tells of none.
        members: the ranks of that process group.
        launched: how many operations this member has begun on that process group.
        collective: the kind of that collective, such as `BARRIER`; empty if it is another one, or not known.
    """

    type: ClassVar[int] = 13

    session: bytes
    number: int
    stack: str
    held: int
    torch_group: str
    members: Members
    launched: int
    collective: str = ""

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_integer("number", self.number, 0, limits.MAX_COUNTER)
        check_text("stack", self.stack, limits.MAX_STACK_BYTES, shortest=0)
        check_integer("held", self.held, 0, 1)
        check_text("torch_group", self.torch_group, limits.MAX_NAME_BYTES, shortest=0)
        check_integer("launched", self.launched, 0, limits.MAX_COUNTER)
        check_text("collective", self.collective, limits.MAX_NAME_BYTES, shortest=0)


@dataclass(frozen=True, slots=True)
class Settled:
    """A member has got a round's rows from the other members themselves, and waits for no answer. It has no answer.

    Attributes:
        session: who speaks.
        key: the round, to which it or another member may have contributed here.
    """

    type: ClassVar[int] = 14

    session: bytes
    key: RoundKey

    def __post_init__(self) -> None:
        check_token("session", self.session)


@dataclass(frozen=True, slots=True, eq=False)
class Digest:
    """A member tells of a step's forward rounds that have passed the server by. It has no answer.

    Attributes:
        session: who speaks.
        step: in which the rounds were.
        layers: the layers' names in the order of the rounds, a line each.
        values: shape (layers, members, 8), float64: the figures of all members of the group, see `statsd_bn.skew`.
    """

    type: ClassVar[int] = 15

    session: bytes
    step: int
    layers: str
    values: FloatArray

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return self.layers.split("\n")

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_integer("step", self.step, 0, limits.MAX_COUNTER)
        check_text("layers", self.layers, limits.MAX_DIGEST_BYTES)
        names = self.names
        check_integer("number of layers", len(names), 1, limits.MAX_DIGEST_LAYERS)
        for name in names:
            check_name("layer", name, limits.MAX_NAME_BYTES)
        check_figures(self.values, len(names), NUMBERS)


@dataclass(frozen=True, slots=True)
class FiguresRequest:
    """Asks the server for what it has seen of the members' data in a group. Anybody may ask.

    Attributes:
        job: the training run.
        group: which of its groups.
        first: how many layers to pass over, in the order of a step.
    """

    type: ClassVar[int] = 16

    job: str
    group: str
    first: int = 0

    def __post_init__(self) -> None:
        check_name("job", self.job, limits.MAX_NAME_BYTES)
        check_name("group", self.group, limits.MAX_NAME_BYTES)
        check_integer("first", self.first, 0, limits.MAX_COUNTER)


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What the server has seen of the members' data in a group: averages over the last looks, layer by layer.

    Attributes:
        job: the training run.
        group: which of its groups.
        first: how many layers come before these.
        total: how many layers there are; 0 where there are no figures, or no such group.
        layers: the names of these layers in the order of a step, a line each; empty without layers.
        values: shape (layers, members, 4), float64: the figures of all members of the group, see `statsd_bn.skew`.
    """

    type: ClassVar[int] = 17

    job: str
    group: str
    first: int
    total: int
    layers: str
    values: FloatArray

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return lines_of(self.layers)

    def __post_init__(self) -> None:
        check_name("job", self.job, limits.MAX_NAME_BYTES)
        check_name("group", self.group, limits.MAX_NAME_BYTES)
        check_integer("first", self.first, 0, limits.MAX_COUNTER)
        check_integer("total", self.total, 0, limits.MAX_COUNTER)
        check_text("layers", self.layers, limits.MAX_FIGURES_BYTES, shortest=0)
        names = self.names
        check_integer("number of layers", len(names), 0, limits.MAX_FIGURES_LAYERS)
        for name in names:
            check_name("layer", name, limits.MAX_NAME_BYTES)
        check_figures(self.values, len(names), FIGURES)


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """A member tells how long its rounds have taken, as it has seen them, since it registered. It has no answer.

    Attributes:
        session: who speaks.
        microseconds: that all of them took.
        counts: how many there were in each bucket, see `statsd_bn.timing.histogram`; the last is beyond all bounds.
    """

    type: ClassVar[int] = 18

    session: bytes
    microseconds: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_integer("microseconds", self.microseconds, 0, limits.MAX_COUNTER)
        if type(self.counts) is not tuple or len(self.counts) != limits.BUCKETS:
            raise ProtocolError(f"counts: expected {limits.BUCKETS} integers, got {shown(self.counts)}")
        for count in self.counts:
            check_integer("count", count, 0, limits.MAX_COUNTER)


@dataclass(frozen=True, slots=True)
class NonFiniteRound:
    """A member tells of a round that has passed the server by, and whose aggregate was not finite. It has no answer.

    Attributes:
        session: who speaks.
        key: the round.
        members: who brought NaN or infinity; somebody.
        what: how many channels were not finite, for people.
    """

    type: ClassVar[int] = 19

    session: bytes
    key: RoundKey
    members: Members
    what: str

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_name("what", self.what, limits.MAX_NAME_BYTES)
        if not self.members.runs:
            raise ProtocolError("members: expected who brought what is not finite, got nobody")


# The most frequent first: it is looked for in this order.
Request = (
    Contribution
    | Carried
    | Register
    | Leave
    | StatusRequest
    | Heartbeat
    | Result
    | Whereabouts
    | Settled
    | Digest
    | RoundTrips
    | NonFiniteRound
    | FiguresRequest
)
"""What a member says."""

Message = Request | Registered | Aggregate | Failure | Status | Pending | Question | Figures

BY_TYPE: dict[int, type[Message]] = {
    message.type: message for message in sorted(get_args(Message), key=lambda kind: kind.type)
}


def lines_of(text: str) -> list[str]:
    """The lines of a text, of which an empty one has none."""
    return text.split("\n") if text else []


def missing_members(group: str, size: int, present: Members, missing: int) -> str:
    """Returns in words whom a group still waits for: by number only in the world, where the numbers are known."""
    if group == WORLD and len(present) + missing == size:
        return f"ranks {sorted(set(range(size)).difference(present))}"
    return f"{missing} rank{'' if missing == 1 else 's'} besides {list(present)}"


def values_of(message: Any) -> list[Any]:
    """Returns a message's field values in wire order."""
    return list(_VALUES_OF[type(message)](message))


def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(kind)]
    # One name would give the bare value.
    return attrgetter(*names) if len(names) > 1 else lambda message: tuple(getattr(message, name) for name in names)


_VALUES_OF = {kind: _getter(kind) for kind in BY_TYPE.values()}
