"""LocalPipe: the lane of a process without others to exchange with.

It adds the rows of this process's replicas as the server would, to the same bits.
"""

from dataclasses import dataclass

from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import sum_in_order
from statsd_bn.round_key import FORWARD, RoundKey
from statsd_bn.rows import Rows

_THIS_PROCESS = Members.of([0])


@dataclass(frozen=True, slots=True)
class LocalPipe:
    """The lane inside one process: its replicas are all there are.

    Args:
        layer: the layer's name.
    """

    layer: str

    def run_slave(self, contribution: Rows, key: RoundKey | None = None) -> Aggregate:
        """Adds the rows in replica order."""
        total = sum_in_order(contribution.values)
        counts = contribution.counts
        return Aggregate(key or self.key(0, 0, FORWARD), len(counts), sum(counts), _THIS_PROCESS, total)

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""
        return RoundKey("in-process", "world", 0, step, self.layer, call, phase)
