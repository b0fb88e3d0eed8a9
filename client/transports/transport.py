"""Transport: how the rows of one layer reach the other members, and how the aggregate comes back.

Every transport follows this contract, so nothing above it knows which one it uses. Each kind has a file of its own, and
`client.transports.choose` decides which one a layer gets.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from client.native.row import NativeRow
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, RoundKey


class RowDone(NamedTuple):
    """What remains of a round that the core has had, and whose sum it has used.

    Attributes:
        key: of the round.
        seconds: that it took.
    """

    key: RoundKey
    seconds: float = 0.0


class Transport(Protocol):
    """Takes rows, returns the aggregate of everybody's rows.

    All transports add the same rows to the same bits. Two are equal if they take the same layer the same way.

    Example usage:

        transport = transport_for("stem.bn", group=None)
        forward = transport.run_slave(rows)
        backward = transport.run_slave(gradient_rows, forward.key.of_phase(BACKWARD))
    """

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Exchanges a contribution for the aggregate of its round.

        Args:
            contribution: this process's rows, one for each of its replicas.
            key: of the round; None for the layer's next forward round.
            phase: of that forward round, one of `FORWARD_PHASES`; all members say the same.
        """

    def run_row(self, row: NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> "Aggregate | RowDone":
        """The same for a row that is still to be computed; the pass is finished with it where the core can do so."""

    @property
    def rank(self) -> int:
        """This process's number among the members that an aggregate names."""

    def places(self) -> Mapping[int, str]:
        """Returns host and process of members, by number, as far as this process can find out; may ask the server."""

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""
