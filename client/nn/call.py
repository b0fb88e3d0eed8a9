"""Call: one synchronised call of a layer, outside of torch.compile.

It takes part in a forward round, or finds the call that a checkpoint computes again, and then moves the running
statistics.
"""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from client.data_parallel.barrier import Barrier
from client.diagnostics import collectives
from client.nn import running_stats
from client.nn.micro_batches import Deferred, MomentAccumulator
from client.ops import checkpointing, engine, native_exchange, plain, streams
from client.ops.checkpointing import exchange_cache, is_inside_backward
from client.ops.exchange import Exchange, phase_of_forward
from client.ops.functional import UNSAVED, Slice, batch_norm, save_in_thread
from client.ops.native import CODES
from client.ops.native_exchange import NativeExchange
from client.ops.plain import PlainExchange
from client.ops.statistics import ChannelMoments, Running, vector_device
from client.ops.triton import exchange as triton_exchange
from client.ops.triton.exchange import TYPES, TritonExchange
from client.transports import device_rows
from client.transports.transport import Transport

_PLAIN = frozenset({Tensor, nn.Parameter, type(None)})


def synchronized_batch_norm(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    call: "Call",
) -> Tensor:
    """Normalises one slice. A subclass of Tensor gets this function in its `__torch_function__`, as `F.batch_norm`.

    Args:
        input: shape (N, C, *).
        weight: shape (C,) or None.
        bias: shape (C,) or None.
        mask: shape (N, *), bool, or None.
        call: the layer's.
    """
    tensors = input, weight, bias, mask
    if not _PLAIN.issuperset(map(type, tensors)):
        if has_torch_function(tensors):
            output: Tensor = handle_torch_function(synchronized_batch_norm, tensors, *tensors, call)
            return output
        input, weight, bias, mask = map(_plain, tensors)  # noqa: A001 - torch's name
    return call.normalise(Slice(input, weight, bias, mask))


def _plain(tensor: Any) -> Any:
    """Takes a tensor's class off: threads of replicas and of backward passes would dispatch to it once more."""
    if type(tensor) in _PLAIN or type(tensor).__torch_function__ is nn.Parameter.__torch_function__:
        return tensor
    return tensor.as_subclass(Tensor)


@dataclass(slots=True)
class Call:
    """What one call needs to know of its layer.

    Attributes:
        layer: a `SynchronizedBatchNorm`.
        transport: of its rounds.
        accumulator: counts the batch while `recalibrate` runs; then nothing moves.
        deferred: says when the running statistics move; None after each call.
        replica: where the replicas of its process meet, and its number among them; None for a layer without any.
    """

    layer: Any
    transport: Transport
    accumulator: MomentAccumulator | None
    deferred: Deferred | None
    replica: tuple[Barrier, int] | None

    def normalise(self, mine: Slice) -> Tensor:
        """Normalises the slice of the layer, or of one of its replicas."""
        if self.replica is not None:
            return self._as_replica(mine, *self.replica)
        earlier = self._earlier(mine, 0) if is_inside_backward() else None
        exchange = earlier or self._exchange([mine])
        if isinstance(exchange, PlainExchange) and (earlier is None or plain.is_plain(mine)):
            output: Tensor = plain.batch_norm(exchange, mine.input, mine.weight, mine.bias)
        else:
            (output,) = batch_norm([mine], exchange)
        due = None if earlier else self._due_after(exchange, has_graph=output.requires_grad)
        return output if due is None else self._moved(output, due.on(vector_device(output)))

    def _as_replica(self, mine: Slice, barrier: Barrier, replica: int) -> Tensor:
        """Normalises the slice of replica number `replica` of a process, together with its siblings at the barrier."""
        mine = save_in_thread(mine)
        if stream := streams.current(mine.input):
            mine = mine._replace(stream=stream)
        if is_inside_backward() and (earlier := self._earlier(mine, replica)):
            return batch_norm([mine], earlier)[0]
        output, due = barrier.meet(replica, f"layer {self.layer.layer_name!r}", mine, self._normalise_replicas)
        return self._moved(output if torch.is_grad_enabled() else output.detach(), due)

    def _earlier(self, mine: Slice, replica: int) -> Exchange | None:
        """Returns the call that a checkpoint computes again, if this is one of its second runs."""
        if self.accumulator is not None:
            return None
        # Modes of the first run, such as that of a selective checkpoint, have not seen this.
        with _disable_current_modes():
            with torch.no_grad():
                moments = engine.moments(mine.input, mine.mask)
            return exchange_cache.find(self.layer.layer_name, self.transport, replica, moments)

    def _normalise_replicas(self, slices: list[Slice]) -> list[tuple[Tensor, Any]]:
        """Runs in the last replica's thread, but not in its grad and inference modes, hooks and streams."""
        of_replicas = [slice_.stream for slice_ in slices if slice_.stream is not None]
        with (
            torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext(),
            torch.enable_grad(),
            checkpointing.without_hooks(),
            streams.entered(of_replicas) if of_replicas else nullcontext(),
        ):
            return self._normalise(slices, *of_replicas)

    def _normalise(self, slices: list[Slice], *of_replicas: Any) -> list[tuple[Tensor, Any]]:
        """Returns an output for each slice, and what its running statistics move by now, if they move."""
        exchange = self._exchange(slices)
        exchange.streams = of_replicas
        if isinstance(exchange, PlainExchange):
            ((x, weight, bias, *_),) = slices
            outputs = [plain.batch_norm(exchange, x, weight, bias)]
        else:
            outputs = batch_norm(slices, exchange)
        due = self._due_after(exchange, has_graph=any(output.requires_grad for output in outputs))
        return [(output, None if due is None else due.on(vector_device(output))) for output in outputs]

    def _due_after(self, exchange: Exchange, *, has_graph: bool) -> ChannelMoments | None:
        """Keeps a call for checkpoints; returns what the running statistics move by, if they still have to."""
        if self.accumulator is None:
            collectives.remember()
            exchange_cache.add(exchange, has_graph=has_graph)
        return None if exchange.has_moved else self._due(exchange.moments)

    def _exchange(self, slices: list[Slice]) -> Exchange:
        """Returns the call's exchange: over the host, or on the devices of its slices."""
        transport, layer = self.transport, self.layer
        # Threads without gradients hold nothing for a backward pass.
        capacity, x = 0, slices[0].input
        is_needed = x.requires_grad or any(each.input.requires_grad or each.saver is UNSAVED for each in slices)
        phase = phase_of_forward(needs_gradient=is_needed)
        if device_rows.may_stay(transport, x):
            inputs = [slice_.input for slice_ in slices]
            capacity = device_rows.capacity_of(transport, inputs, phase, over_the_host=self.accumulator is not None)
        of_layer = layer.layer_name, layer.eps, layer.eps_mode, phase
        if capacity and triton_exchange.serves(slices, capacity):
            return TritonExchange(transport, *of_layer, capacity=capacity, running=self._running(x, TYPES))
        if not capacity and len(slices) == 1 and native_exchange.serves(slices[0]):
            return NativeExchange(transport, *of_layer, running=self._running(x, CODES))
        return Exchange(transport, *of_layer, capacity=capacity)

    def _running(self, x: Tensor, types: Collection[torch.dtype]) -> Running | None:
        """Returns the running statistics that a plain call moves itself."""
        is_moved = self.deferred is None and self.accumulator is None
        return running_stats.in_place(self.layer, x, types) if is_moved else None

    def _due(self, batch: ChannelMoments) -> ChannelMoments | None:
        """Counts a batch once for all replicas."""
        if self.accumulator is not None:
            self.accumulator.add(batch.on_host())
            return None
        if not self.layer.training:
            return None
        return batch if self.deferred is None else self.deferred.add(batch)

    def _moved(self, output: Tensor, due: Any) -> Tensor:
        if due is not None:
            running_stats.move_by(self.layer, due)
        return output
