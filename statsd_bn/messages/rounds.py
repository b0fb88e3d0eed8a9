"""What members bring to a round, and what becomes of it."""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

from statsd_bn import limits
from statsd_bn.checks import check_integer, check_name, check_text, check_token, check_values, shown
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NOBODY, Members
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows


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
        non_finite: who of the members brought NaN or infinity; nobody where all values are finite.
    """

    type: ClassVar[int] = 4

    key: RoundKey
    replicas: int
    count: int
    members: Members
    values: FloatArray
    non_finite: Members = NOBODY

    def __post_init__(self) -> None:
        check_integer("replicas", self.replicas, 1, limits.MAX_REPLICAS * limits.MAX_MEMBERS)
        check_integer("count", self.count, 0, limits.MAX_COUNT)
        check_values(self.values, 2)


def sound_aggregate(
    key: RoundKey,
    replicas: int,
    count: int,
    members: Members,
    values: FloatArray,
    non_finite: Members,
) -> Aggregate:
    """Returns an aggregate that needs no check: it was made here of rows that have passed theirs, or came before."""
    aggregate = _new(Aggregate)
    _set_key(aggregate, key)
    _set_replicas(aggregate, replicas)
    _set_count(aggregate, count)
    _set_members(aggregate, members)
    _set_values(aggregate, values)
    _set_non_finite(aggregate, non_finite)
    return aggregate


# What sets the fields of a frozen dataclass.
_new = object.__new__
_set_key, _set_replicas, _set_count, _set_members, _set_values, _set_non_finite = (
    getattr(Aggregate, field.name).__set__ for field in fields(Aggregate)
)


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
