"""LocalPipe: the transport of a process without others to exchange with.

It adds the rows of this process's replicas as the server would, to the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from client.diagnostics.collectives import rank_in_torch
from client.native.library import DONE, EXCHANGE
from client.native.row import NativeRow
from client.session.current import current_connection
from client.transports.transport import RowDone
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import Aggregate, sound_aggregate
from statsd_bn.reduction import Rows, bearers, is_finite, sum_in_order
from statsd_bn.round_key import FORWARD, RoundKey


@dataclass(frozen=True, slots=True)
class LocalPipe:
    """The transport inside one process: its replicas are all there are.

    Args:
        layer: the layer's name.
    """

    layer: str

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Adds the rows in replica order."""
        counts, values = contribution.counts, contribution.values
        total = sum_in_order(values)
        rank = self.rank
        whose = NOBODY if is_finite(total) else bearers([(rank, values)])
        return sound_aggregate(
            key or _key(self.layer, 0, 0, phase), len(counts), sum(counts), _alone(rank), total, whose
        )

    def run_row(self, row: NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate | RowDone:
        """Takes the own row for the sum."""
        if row.run(EXCHANGE) == DONE:
            return RowDone(key or _key(self.layer, 0, 0, phase))
        return self.run_slave(row.brought, key, phase)

    @property
    def rank(self) -> int:
        """This process's number among the members that an aggregate names: in its job, if it has one, or else 0."""
        connection = current_connection()
        return connection.rank if connection else rank_in_torch() or 0

    def places(self) -> Mapping[int, str]:
        """Nobody's: there are no others."""
        return {}

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""
        return _key(self.layer, step, call, phase)


@lru_cache(maxsize=64)
def _alone(rank: int) -> Members:
    return Members.of([rank])


@lru_cache(maxsize=1024)
def _key(layer: str, step: int, call: int, phase: str) -> RoundKey:
    return RoundKey("in-process", "world", 0, step, layer, call, phase)
