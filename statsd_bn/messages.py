"""The messages of the protocol, as values that check themselves when they are built.

A message that exists is valid, whether the caller built it or `wire.decode` did. docs/protocol.md describes every
field; the order of fields here is their order on the wire.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache, partial
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, get_args

from statsd_bn import limits
from statsd_bn.checks import check_integer, check_name, check_text, check_token, check_values, short_repr
from statsd_bn.errors import ProtocolError, UnknownSession
from statsd_bn.members import NO_MEMBERS, Members, format_ranks
from statsd_bn.reduction import FloatArray, Rows, new
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import check_figures

WORLD = "world"  # the group of all members of a job, numbered from 0
NO_SERVER = bytes(limits.TOKEN_BYTES)  # the server id of a member that has not been registered yet

# Kinds of torch collectives. All ranks leave the first three at about the same time; BUFFERS is the broadcast at the
# start of DistributedDataParallel's forward pass.
BARRIER, ALL_REDUCE, ALL_GATHER, BUFFERS = "barrier", "all_reduce", "all_gather", "buffers"


class Checked:
    """Base of messages: numbered dataclasses that run the checks in their fields' annotations when they are built."""

    __slots__ = ()
    type: ClassVar[int]

    def __init_subclass__(cls, number: int = 0) -> None:
        if number:  # 0 when `dataclass` makes the class again, with slots
            cls.type = number

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check in _checks(kind):
            check(name, getattr(self, name))
        self._check()

    def _check(self) -> None:
        """Makes the checks that are not in the fields' annotations."""


@cache
def _checks(kind: Any) -> list[tuple[str, Callable[[str, object], None]]]:
    return [(field.name, check) for field in fields(kind) for check in getattr(field.type, "__metadata__", ())]


def integer_in(low: int, high: int) -> Callable[[str, object], None]:
    """Returns a check for an int in [low, high]."""
    return partial(check_integer, low=low, high=high)


def text_within(longest: int, shortest: int = 0) -> Callable[[str, object], None]:
    """Returns a check for a text of `shortest` to `longest` bytes."""
    return partial(check_text, longest=longest, shortest=shortest)


Token = Annotated[bytes, check_token]
Name = Annotated[str, partial(check_name, longest=limits.MAX_NAME_BYTES)]
Counter = Annotated[int, integer_in(0, limits.MAX_COUNTER)]


def digest(token: bytes) -> bytes:
    """Returns the digest that names a session in the server's messages; it has the length of a token."""
    # A session's token is secret: its holder can act as the member. So it travels only from the member to the server.
    return blake2b(token, digest_size=limits.TOKEN_BYTES, person=b"sbn session").digest()


def unknown_session(session: bytes) -> UnknownSession:
    """Returns the error that makes a member register again and resend its results."""
    name = digest(session).hex()
    return UnknownSession(f"the session with digest {name} is not registered here", digest=name)


# Membership: registration, liveness, and where a member is.


class Participation(IntEnum):
    """Whether a member takes part in the rounds of its group."""

    TAKES_PART = 0
    PAUSED = 1  # rounds go on without it, because its data has ended
    REJOINING = 2  # it waits until all others rejoin too


@dataclass(frozen=True, slots=True)
class Register(Checked, number=1):
    """A member registers in a group, and reports its state. A repetition asks for the group's state again."""

    session: Token  # the secret token of the member, fresh for each of its lives in a group
    job: Name
    group: Name
    epoch: Counter  # one life of the group's membership
    member: Annotated[int, integer_in(0, limits.MAX_MEMBERS - 1)]
    world_size: Annotated[int, integer_in(1, limits.MAX_MEMBERS)]  # members that the group starts with
    min_members: int  # members that an elastic group needs to go on after losses; 0: the group is strict
    deadline: float  # seconds that a round opened by this member may stay open
    place: Name  # host and process, for people
    participation: Annotated[int, integer_in(0, len(Participation) - 1)] = Participation.TAKES_PART.value
    server: Token = NO_SERVER  # id of the server that the member was last registered with
    step: Counter = 0  # the member's current step
    first_step: Counter = 0  # the first step that it takes part in, as the server assigned it
    results: Annotated[int, integer_in(0, limits.CACHED_ROUNDS)] = 0  # how many it can send to a restarted server
    known: Members = NO_MEMBERS  # the group's members, as the server last reported them

    @property
    def was_in_group(self) -> bool:
        """Whether the member was in the group while the group was open."""
        return self.server != NO_SERVER and bool(self.known.runs)

    @property
    def has_started(self) -> bool:
        """Whether the member has received a result, or is beyond the first step."""
        return self.step > 0 or self.results > 0

    def _check(self) -> None:
        check_integer("min_members", self.min_members, 0, self.world_size)
        if type(self.deadline) is not float or not 0 < self.deadline <= limits.MAX_DEADLINE:
            raise ProtocolError(
                f"deadline: expected seconds in (0, {limits.MAX_DEADLINE:g}], got {short_repr(self.deadline)}"
            )


@dataclass(frozen=True, slots=True)
class Registered(Checked, number=2):
    """The server has registered the member, and reports whether the group is open."""

    digest: Token  # of the session that it answers; not the token: another process may receive the answer
    server: Token
    epoch: Counter
    first_step: Counter
    missing: Annotated[int, integer_in(0, limits.MAX_MEMBERS)]
    present: Members


@dataclass(frozen=True, slots=True)
class Leave(Checked, number=5):
    """A member leaves its group. `cause` is empty for an orderly end, else the error that ended the member."""

    session: Token
    cause: Annotated[str, text_within(limits.MAX_TEXT_BYTES)]


@dataclass(frozen=True, slots=True)
class Heartbeat(Checked, number=9):
    """A sign of life of a member that has nothing else to send. The answer, if any, is a Failure."""

    session: Token
    step: Counter = 0
    rounds: Counter = 0
    transport: Annotated[str, text_within(limits.MAX_PHASE_BYTES)] = ""
    why: Annotated[str, text_within(limits.MAX_NAME_BYTES)] = ""
    waited: Counter = 0


@dataclass(frozen=True, slots=True)
class StackRequest(Checked, number=12):
    """The server asks a late member for its stack, over the socket of the member's heartbeats."""

    digest: Token
    number: Counter
    torch_group: Annotated[str, text_within(limits.MAX_NAME_BYTES)] = ""


@dataclass(frozen=True, slots=True)
class StackReport(Checked, number=13):
    """A member's answer to a StackRequest: where its main thread is."""

    session: Token
    number: Counter
    stack: Annotated[str, text_within(limits.MAX_STACK_BYTES)]
    in_collective: Annotated[int, integer_in(0, 1)]
    torch_group: Annotated[str, text_within(limits.MAX_NAME_BYTES)]
    members: Members
    launched: Counter
    collective: Annotated[str, text_within(limits.MAX_NAME_BYTES)] = ""


def format_missing_members(group: str, size: int, present: Members, missing: int) -> str:
    """Returns the members that a group waits for, as text: the ranks in "world", only the number in other groups."""
    if group == WORLD and len(present) + missing == size:
        return format_ranks(Members.of(set(range(size)).difference(present)))
    besides = f" besides {format_ranks(present)}" if present else ""
    return f"{missing} rank{'s' * (missing != 1)}{besides}"


# Rounds.


# Not frozen: a frozen class takes three times as long to set its fields, and each frame of a round makes an object.
@dataclass(slots=True, eq=False)
class Contribution:
    """One member's rows for one round."""

    type: ClassVar[int] = 3

    session: bytes
    key: RoundKey
    attempt: int
    rows: Rows

    def __post_init__(self) -> None:
        check_token("session", self.session)
        check_integer("attempt", self.attempt, 0, limits.MAX_COUNTER)

    @staticmethod
    def unchecked(session: bytes, key: RoundKey, attempt: int, rows: Rows) -> "Contribution":
        """Returns a contribution whose fields the caller has checked."""
        made = new(Contribution)
        made.session, made.key, made.attempt, made.rows = session, key, attempt, rows
        return made


@dataclass(slots=True, eq=False)  # not frozen, like a Contribution
class Aggregate:
    """The sum of all rows of one round, the same bytes for every member.

    Attributes:
        replicas: number of rows in the sum.
        count: sum of their counts.
        values: shape (vectors, channels), float64: the sum of the rows in replica order; in a gather the concatenated
            rows.
        non_finite: members that sent NaN or infinity.
    """

    type: ClassVar[int] = 4

    key: RoundKey
    replicas: int
    count: int
    members: Members
    values: FloatArray
    non_finite: Members = NO_MEMBERS

    def __post_init__(self) -> None:
        check_integer("replicas", self.replicas, 1, limits.MAX_REPLICAS * limits.MAX_MEMBERS)
        check_integer("count", self.count, 0, limits.MAX_COUNT)
        check_values(self.values, 2)

    @staticmethod
    def unchecked(
        key: RoundKey, replicas: int, count: int, members: Members, values: FloatArray, non_finite: Members
    ) -> "Aggregate":
        """Returns an aggregate that was computed from checked rows, or decoded and checked."""
        made = new(Aggregate)
        made.key, made.replicas, made.count = key, replicas, count
        made.members, made.values, made.non_finite = members, values, non_finite
        return made


@dataclass(frozen=True, slots=True)
class Failure(Checked, number=6):
    """The server's answer to a request that failed. `key` names the failed round, if any."""

    code: Name
    message: Annotated[str, text_within(limits.MAX_TEXT_BYTES)]
    fields: dict[str, Any]
    key: RoundKey | None = None

    def _check(self) -> None:
        if type(self.fields) is not dict or not all(type(name) is str for name in self.fields):
            raise ProtocolError(f"fields: expected a map from names, got {short_repr(self.fields)}")


@dataclass(frozen=True, slots=True)
class Pending(Checked, number=10):
    """The server's answer to a contribution that is sent again while its round is open."""

    key: RoundKey
    seconds: Counter
    message: Annotated[str, text_within(limits.MAX_TEXT_BYTES, shortest=1)]
    stacks: Annotated[str, text_within(limits.MAX_TEXT_BYTES)] = ""


@dataclass(frozen=True, slots=True, eq=False)
class Result(Checked, number=11):
    """A round's aggregate, which the member received before the server restarted."""

    session: Token
    aggregate: Aggregate


@dataclass(frozen=True, slots=True)
class RoundDone(Checked, number=14):
    """A round is done without the server: the member has received all rows from the other members. No answer."""

    session: Token
    key: RoundKey


# Reports: the state of the jobs, and figures of data and times.


@dataclass(frozen=True, slots=True)
class StatusRequest(Checked, number=7):
    """Asks for the server's report. Needs no registration."""


@dataclass(frozen=True, slots=True)
class Status(Checked, number=8):
    """The server's report, as docs/seeing.md describes it."""

    report: dict[str, Any]

    def _check(self) -> None:
        if type(self.report) is not dict:
            raise ProtocolError(f"report: expected a map, got {type(self.report).__name__}")


class _LayerFigures(Checked):
    """Figures of layers, see `statsd_bn.skew`: `layers` has a line per layer, `values` shape (layers, members, 4)."""

    __slots__ = ()

    layers: str
    values: FloatArray
    _bounds: ClassVar[tuple[int, int]]  # smallest and largest number of layers

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return self.layers.split("\n") if self.layers else []

    def _check(self) -> None:
        names = self.names
        check_integer("number of layers", len(names), *self._bounds)
        for name in names:
            check_name("layer", name, limits.MAX_NAME_BYTES)
        check_figures(self.values, len(names))


@dataclass(frozen=True, slots=True, eq=False)
class SkewStats(_LayerFigures, number=15):
    """A member reports the figures of a step's forward rounds that the server did not see. No answer."""

    _bounds: ClassVar = (1, limits.MAX_SKEW_LAYERS)

    session: Token
    step: Counter
    layers: Annotated[str, text_within(limits.MAX_SKEW_BYTES, shortest=1)]
    values: FloatArray


@dataclass(frozen=True, slots=True)
class FiguresRequest(Checked, number=16):
    """Asks for the figures of the members' data in a group. Needs no registration."""

    job: Name
    group: Name
    first: Counter = 0


@dataclass(frozen=True, slots=True, eq=False)
class Figures(_LayerFigures, number=17):
    """The figures of the members' data in a group: averages over the latest samples of each layer."""

    _bounds: ClassVar = (0, limits.MAX_FIGURES_LAYERS)

    job: Name
    group: Name
    first: Counter
    total: Counter
    layers: Annotated[str, text_within(limits.MAX_FIGURES_BYTES)]
    values: FloatArray


@dataclass(frozen=True, slots=True)
class _Durations(Checked):
    """Durations in a member's rounds since its registration, as a histogram. No answer."""

    session: Token
    microseconds: Counter
    counts: tuple[int, ...]

    def _check(self) -> None:
        if type(self.counts) is not tuple or len(self.counts) != limits.BUCKETS:
            raise ProtocolError(f"counts: expected {limits.BUCKETS} integers, got {short_repr(self.counts)}")
        for count in self.counts:
            check_integer("count", count, 0, limits.MAX_COUNTER)


@dataclass(frozen=True, slots=True)
class RoundTrips(_Durations, number=18):
    """Durations of a member's rounds, as the member measured them."""


@dataclass(frozen=True, slots=True)
class LatenessReport(_Durations, number=20):
    """How much later than the others a member arrived at the shared-memory rounds to which it came last."""


@dataclass(frozen=True, slots=True)
class NonFiniteRound(Checked, number=19):
    """A member reports a non-finite aggregate of a round that the server did not see. No answer."""

    session: Token
    key: RoundKey
    members: Members
    what: Name

    def _check(self) -> None:
        if not self.members.runs:
            raise ProtocolError("members: expected at least one member with non-finite values, got none")


_Report = StackReport | RoundDone | SkewStats | RoundTrips | LatenessReport | NonFiniteRound
Request = Contribution | Register | Leave | StatusRequest | Heartbeat | Result | FiguresRequest | _Report
"""Messages to the server."""

Message = Request | Registered | Aggregate | Failure | Status | Pending | StackRequest | Figures
"""All messages."""

BY_TYPE: dict[int, type[Message]] = {
    message.type: message for message in sorted(get_args(Message), key=lambda kind: kind.type)
}
