"""What members bring to a round, and what becomes of it."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from statsd_bn import limits
from statsd_bn.checks import (
    Checked,
    Counter,
    Name,
    Token,
    check_integer,
    check_token,
    check_values,
    shown,
    text_within,
)
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NOBODY, Members
from statsd_bn.reduction import FloatArray, Rows
from statsd_bn.round_key import RoundKey

_new = object.__new__


# Not frozen: setting fields takes a third of the time, and each frame of a round makes one.
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


def sound_contribution(session: bytes, key: RoundKey, attempt: int, rows: Rows) -> Contribution:
    """Returns a contribution that needs no check: whoever calls has made it."""
    contribution = _new(Contribution)
    contribution.session, contribution.key = session, key
    contribution.attempt, contribution.rows = attempt, rows
    return contribution


@dataclass(slots=True, eq=False)  # not frozen, as a Contribution
class Aggregate:
    """The sum of all rows of one round, the same bytes for every member.

    Attributes:
        replicas: how many rows were added.
        count: the sum of their counts.
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
    aggregate.key, aggregate.replicas, aggregate.count = key, replicas, count
    aggregate.members, aggregate.values, aggregate.non_finite = members, values, non_finite
    return aggregate


@dataclass(frozen=True, slots=True)
class Failure(Checked):
    """The server's answer when it cannot give what was asked. `key` names the round it is about, if any."""

    type: ClassVar[int] = 6

    code: Name
    message: Annotated[str, text_within(limits.MAX_TEXT_BYTES)]
    fields: dict[str, Any]
    key: RoundKey | None = None

    def _check(self) -> None:
        if type(self.fields) is not dict or not all(type(name) is str for name in self.fields):
            raise ProtocolError(f"fields: expected a map from names, got {shown(self.fields)}")


@dataclass(frozen=True, slots=True)
class Pending(Checked):
    """The server's answer to a contribution that is sent again while its round is open.

    Attributes:
        seconds: how long it has been open, in whole seconds.
        message: who is late, for a person.
        stacks: where those are, as they have answered; empty while nothing is known.
    """

    type: ClassVar[int] = 10

    key: RoundKey
    seconds: Counter
    message: Annotated[str, text_within(limits.MAX_TEXT_BYTES, shortest=1)]
    stacks: Annotated[str, text_within(limits.MAX_TEXT_BYTES)] = ""


@dataclass(frozen=True, slots=True, eq=False)
class Result(Checked):
    """What a member was given for a round, told to a server that has no memory of it.

    Attributes:
        aggregate: the aggregate that an earlier life of the server gave it.
    """

    type: ClassVar[int] = 11

    session: Token
    aggregate: Aggregate


@dataclass(frozen=True, slots=True)
class RoundDone(Checked):
    """A member has got a round's rows from the other members themselves, and waits for no answer. It has no answer.

    Attributes:
        key: the round, to which it or another member may have contributed here.
    """

    type: ClassVar[int] = 14

    session: Token
    key: RoundKey
