"""LocalPipe: the transport of a process without other members."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from client.diagnostics.collectives import rank_in_torch
from client.native.library import DONE, EXCHANGE, NativeRow
from client.session.current import current_connection
from client.transports.transport import NativeResult
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows, is_finite, non_finite_members, sum_in_order
from statsd_bn.round_key import FORWARD, RoundKey


@dataclass(frozen=True, slots=True)
class LocalPipe:
    """The transport between the replicas of one process."""

    layer: str

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Add the rows in replica order."""
        counts, values = contribution.counts, contribution.values
        total = sum_in_order(values)
        rank = self.rank
        non_finite = NO_MEMBERS if is_finite(total) else non_finite_members([(rank, values)])
        key = key or _key(self.layer, 0, 0, phase)
        return Aggregate.unchecked(key, len(counts), sum(counts), _only(rank), total, non_finite)

    def run_row(self, row: NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate | NativeResult:
        """Use the row itself as the sum."""
        if row.run(EXCHANGE) == DONE:
            return NativeResult(key or _key(self.layer, 0, 0, phase))
        return self.run_slave(row.contribution, key, phase)

    @property
    def rank(self) -> int:
        """This process's rank in its job, or else in torch's default process group, or else 0."""
        connection = current_connection()
        return connection.rank if connection else rank_in_torch() or 0

    def places(self) -> Mapping[int, str]:
        """Return no places: there are no other members."""
        return {}

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Key of a round of an earlier call."""
        return _key(self.layer, step, call, phase)


@lru_cache(maxsize=64)
def _only(rank: int) -> Members:
    return Members.of([rank])


@lru_cache(maxsize=1024)
def _key(layer: str, step: int, call: int, phase: str) -> RoundKey:
    return RoundKey("in-process", "world", 0, step, layer, call, phase)
