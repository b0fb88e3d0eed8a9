"""Call: one synchronised call of a layer, outside of torch.compile.

It takes part in a forward round, or finds the call that a checkpoint computes again, and then moves the running
statistics.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client.autograd.checkpointing import exchanges, is_inside_backward
from client.autograd.exchange import Exchange
from client.autograd.functional import Slice, batch_norm, held
from client.data_parallel.barrier import Barrier
from client.kernels import dispatch
from client.lanes.lane import Lane
from client.layers import ddp_buffers, running_stats
from client.layers.micro_batches import Deferred
from client.layers.recalibration_moments import Tally
from statsd_bn.moments import Moments


@dataclass(frozen=True, slots=True)
class Call:
    """What one call needs to know of its layer.

    Attributes:
        layer: a `SynchronizedBatchNorm`.
        lane: of its rounds.
        tally: counts the batch while `recalibrate` runs; then nothing moves.
        deferred: says when the running statistics move; None after each call.
    """

    layer: Any
    lane: Lane
    tally: Tally | None
    deferred: Deferred | None

    def by_itself(self, mine: Slice) -> Tensor:
        """Normalises the slice of a layer that has no replicas in its process."""
        if earlier := self._earlier(mine, 0):
            return batch_norm([mine], earlier)[0]
        output, due = self._normalise([mine])[0]
        return self._moved(output, due)

    def as_replica(self, mine: Slice, barrier: Barrier, replica: int) -> Tensor:
        """Normalises the slice of replica number `replica` of a process, together with its siblings at the barrier."""
        mine = held(mine)
        if earlier := self._earlier(mine, replica):
            return batch_norm([mine], earlier)[0]
        output, due = barrier.meet(replica, f"layer {self.layer.layer_name!r}", mine, self._normalise_replicas)
        return self._moved(output if torch.is_grad_enabled() else output.detach(), due)

    def _earlier(self, mine: Slice, replica: int) -> Exchange | None:
        """Returns the call that a checkpoint computes again, if this is one of its second runs."""
        if self.tally is not None or not is_inside_backward():
            return None
        with torch.no_grad():
            moments = dispatch.moments(mine.input, mine.mask)
        return exchanges.find(self.layer.layer_name, self.lane, replica, moments)

    def _normalise_replicas(self, slices: list[Slice]) -> list[tuple[Tensor, Moments | None]]:
        """Runs in the thread of the last replica to come, and not in that thread's grad mode."""
        with torch.enable_grad():
            return self._normalise(slices)

    def _normalise(self, slices: list[Slice]) -> list[tuple[Tensor, Moments | None]]:
        """Returns an output for each slice, and what its running statistics move by now, if they move."""
        layer = self.layer
        exchange = Exchange(self.lane, layer.layer_name, layer.eps, layer.eps_mode)
        outputs = batch_norm(slices, exchange)
        if self.tally is None:
            ddp_buffers.settle(exchange)
            exchanges.remember(exchange, has_graph=any(output.requires_grad for output in outputs))
        due = self._due(exchange.moments)
        return [(output, due) for output in outputs]

    def _due(self, batch: Moments) -> Moments | None:
        """Counts a batch once for all replicas."""
        if self.tally is not None:
            self.tally.add(batch)
            return None
        if not self.layer.training:
            return None
        return batch if self.deferred is None else self.deferred.add(batch)

    def _moved(self, output: Tensor, due: Moments | None) -> Tensor:
        if due is not None:
            running_stats.move_by(self.layer, due)
        return output
