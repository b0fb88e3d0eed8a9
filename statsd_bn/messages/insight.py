"""What is told and asked of how the jobs are: reports, and figures of data and times."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from statsd_bn import limits
from statsd_bn.checks import Checked, Counter, Name, Token, check_integer, check_name, shown, text_within
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import check_figures


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks the server what it is doing. Anybody may ask."""

    type: ClassVar[int] = 7


@dataclass(frozen=True, slots=True)
class Status(Checked):
    """What the server is doing: a report as docs/protocol.md describes it."""

    type: ClassVar[int] = 8

    report: dict[str, Any]

    def _check(self) -> None:
        if type(self.report) is not dict:
            raise ProtocolError(f"report: expected a map, got {type(self.report).__name__}")


@dataclass(frozen=True, slots=True, eq=False)
class SkewStats(Checked):
    """A member tells of a step's forward rounds that have passed the server by. It has no answer.

    Attributes:
        layers: the layers' names in the order of the rounds, a line each.
        values: shape (layers, members, 4), float64: the figures of all members of the group, see `statsd_bn.skew`.
    """

    type: ClassVar[int] = 15

    session: Token
    step: Counter
    layers: Annotated[str, text_within(limits.MAX_SKEW_BYTES, shortest=1)]
    values: FloatArray

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return self.layers.split("\n")

    def _check(self) -> None:
        names = self.names
        check_integer("number of layers", len(names), 1, limits.MAX_SKEW_LAYERS)
        for name in names:
            check_name("layer", name, limits.MAX_NAME_BYTES)
        check_figures(self.values, len(names))


@dataclass(frozen=True, slots=True)
class FiguresRequest(Checked):
    """Asks the server for what it has seen of the members' data in a group. Anybody may ask.

    Attributes:
        first: how many layers to pass over, in the order of a step.
    """

    type: ClassVar[int] = 16

    job: Name
    group: Name
    first: Counter = 0


@dataclass(frozen=True, slots=True, eq=False)
class Figures(Checked):
    """What the server has seen of the members' data in a group: averages over the last looks, layer by layer.

    Attributes:
        first: how many layers come before these.
        total: how many layers there are; 0 where there are no figures, or no such group.
        layers: the names of these layers in the order of a step, a line each; empty without layers.
        values: shape (layers, members, 4), float64: the figures of all members of the group, see `statsd_bn.skew`.
    """

    type: ClassVar[int] = 17

    job: Name
    group: Name
    first: Counter
    total: Counter
    layers: Annotated[str, text_within(limits.MAX_FIGURES_BYTES)]
    values: FloatArray

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return lines_of(self.layers)

    def _check(self) -> None:
        names = self.names
        check_integer("number of layers", len(names), 0, limits.MAX_FIGURES_LAYERS)
        for name in names:
            check_name("layer", name, limits.MAX_NAME_BYTES)
        check_figures(self.values, len(names))


@dataclass(frozen=True, slots=True)
class _Times(Checked):
    """A member tells of times in its rounds since it registered. It has no answer.

    Attributes:
        microseconds: all of them together.
        counts: how many there were in each bucket, see `statsd_bn.timing`; the last is beyond all bounds.
    """

    session: Token
    microseconds: Counter
    counts: tuple[int, ...]

    def _check(self) -> None:
        if type(self.counts) is not tuple or len(self.counts) != limits.BUCKETS:
            raise ProtocolError(f"counts: expected {limits.BUCKETS} integers, got {shown(self.counts)}")
        for count in self.counts:
            check_integer("count", count, 0, limits.MAX_COUNTER)


@dataclass(frozen=True, slots=True)
class RoundTrips(_Times):
    """How long a member's rounds have taken, as it has seen them."""

    type: ClassVar[int] = 18


@dataclass(frozen=True, slots=True)
class LatenessReport(_Times):
    """How much later than all others a member has come, each time that it came last to a round in shared memory."""

    type: ClassVar[int] = 20


@dataclass(frozen=True, slots=True)
class NonFiniteRound(Checked):
    """A member tells of a round that has passed the server by, and whose aggregate was not finite. It has no answer.

    Attributes:
        members: who brought NaN or infinity; somebody.
        what: how many channels were not finite, for people.
    """

    type: ClassVar[int] = 19

    session: Token
    key: RoundKey
    members: Members
    what: Name

    def _check(self) -> None:
        if not self.members.runs:
            raise ProtocolError("members: expected who brought what is not finite, got nobody")


def lines_of(text: str) -> list[str]:
    """The lines of a text, of which an empty one has none."""
    return text.split("\n") if text else []
