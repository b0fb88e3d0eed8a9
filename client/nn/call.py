"""One synchronised call of a layer, outside of torch.compile: a forward round and the update of running statistics."""

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
from client.nn.running_stats import DeferredUpdate, MomentAccumulator
from client.ops import checkpointing, engine, functional, native
from client.ops.checkpointing import exchange_cache, is_inside_backward
from client.ops.exchange import Exchange, PlainExchange, phase_of_forward
from client.ops.functional import UNSAVED, Slice, batch_norm, is_plain, plain_batch_norm, save_in_thread
from client.ops.native import CODES, NativeExchange
from client.ops.statistics import ChannelMoments, Running
from client.ops.triton import exchange as triton_exchange
from client.ops.triton.exchange import TYPES, TritonExchange
from client.transports import device_rows
from client.transports.transport import Transport

_PLAIN_TYPES = frozenset({Tensor, nn.Parameter, type(None)})


def synchronized_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, call: "SynchronizedCall"
) -> Tensor:
    """Normalise one slice. Subclasses of Tensor receive this function in `__torch_function__`, like `F.batch_norm`."""
    tensors = input, weight, bias, mask
    if not _PLAIN_TYPES.issuperset(map(type, tensors)):
        if has_torch_function(tensors):
            return handle_torch_function(synchronized_batch_norm, tensors, *tensors, call)
        input, weight, bias, mask = map(_unwrap, tensors)
    return call.normalise(Slice(input, weight, bias, mask))


def _unwrap(tensor: Any) -> Any:
    """View a tensor as a plain Tensor: a subclass would dispatch again in replicas' threads and in backward passes."""
    if type(tensor) in _PLAIN_TYPES or type(tensor).__torch_function__ is nn.Parameter.__torch_function__:
        return tensor
    return tensor.as_subclass(Tensor)


def plain_call(
    layer: Any, transport: Transport, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Normalise a layer's only slice by the native core, or return None where `SynchronizedCall` has to do it."""
    if is_inside_backward() or device_rows.may_use_devices(transport, x) or not native.supports_call(x, weight, bias):
        return None
    running = running_stats.in_place_buffers(layer, x, CODES)
    if running is None:
        return None
    phase = phase_of_forward(needs_gradient=x.requires_grad)
    exchange = NativeExchange(transport, layer.layer_name, layer.eps, layer.eps_mode, phase)
    exchange.running = running  # not by a keyword, which takes 0.6 µs longer
    output: Tensor = plain_batch_norm(exchange, x, weight, bias)
    collectives.record_ddp_wrapper()
    exchange_cache.add(exchange, has_graph=output.requires_grad)
    return output


@dataclass(slots=True)
class SynchronizedCall:
    """One call of a layer in training, or while `recalibrate` runs."""

    layer: Any  # a `SynchronizedBatchNorm` or `BatchNormCall`
    transport: Transport
    accumulator: MomentAccumulator | None  # of `recalibrate`; with it the running statistics do not change
    deferred: DeferredUpdate | None  # None where each call updates the running statistics
    replica: tuple[Barrier, int] | None  # barrier of the local replicas, and this replica's number; or None

    def normalise(self, slice_: Slice) -> Tensor:
        """Normalise the slice; if it is a replica's, together with the other replicas' slices at the barrier."""
        barrier, replica = self.replica or (None, 0)
        if barrier is not None:
            slice_ = save_in_thread(slice_)
            if stream := functional.stream_of(slice_.input):
                slice_ = slice_._replace(stream=stream)
        if (recomputed := self._recompute(slice_, replica)) is not None:
            return recomputed
        output: Tensor
        if barrier is None:
            ((output, due),) = self._normalise_slices([slice_])
        else:
            point = f"layer {self.layer.layer_name!r}"
            output, due = barrier.wait(replica, point, slice_, self._normalise_replicas)
            output = output if torch.is_grad_enabled() else output.detach()
        if due is not None:
            running_stats.update_from(self.layer, due)
        return output

    def _recompute(self, slice_: Slice, replica: int) -> Tensor | None:
        """If a checkpoint recomputes this call, normalise with the first run's results; otherwise return None."""
        if self.accumulator is not None or not is_inside_backward():
            return None
        # The mode of a selective checkpoint must not see these operations, which the first run did not have.
        with _disable_current_modes():
            with torch.no_grad():
                moments = engine.moments(slice_.input, slice_.mask)
            exchange = exchange_cache.find(self.layer.layer_name, self.transport, replica, moments)
        if exchange is None:
            return None
        return (_outputs if is_plain(slice_) else batch_norm)([slice_], exchange)[0]

    def _normalise_replicas(self, slices: list[Slice]) -> list[tuple[Tensor, Any]]:
        """Normalise all slices in the last replica's thread, outside of its modes, hooks and streams."""
        of_replicas = [slice_.stream for slice_ in slices if slice_.stream is not None]
        with (
            torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext(),
            torch.enable_grad(),
            checkpointing.without_hooks(),
            functional.in_streams(of_replicas) if of_replicas else nullcontext(),
        ):
            return self._normalise_slices(slices, *of_replicas)

    def _normalise_slices(self, slices: list[Slice], *of_replicas: Any) -> list[tuple[Tensor, Any]]:
        """Return for each slice its output, and the moments for an update of the running statistics, if one is due."""
        exchange = self._new_exchange(slices)
        exchange.streams = of_replicas
        outputs = _outputs(slices, exchange)
        due = self._finish(exchange, has_graph=any(output.requires_grad for output in outputs))
        return [(output, None if due is None else due.beside(output)) for output in outputs]

    def _new_exchange(self, slices: list[Slice]) -> Exchange:
        """Create the exchange of this call, over the host or on the devices of its slices."""
        transport, layer = self.transport, self.layer
        x = slices[0].input
        # An `UNSAVED` slice's own thread has disabled gradients: `phase_of_forward` would return FORWARD there.
        needs_gradient = x.requires_grad or any(each.input.requires_grad or each.saver is UNSAVED for each in slices)
        phase = phase_of_forward(needs_gradient=needs_gradient)
        inputs, on_host = [slice_.input for slice_ in slices], self.accumulator is not None
        capacity = device_rows.device_capacity(transport, inputs, phase, on_host=on_host)
        of_layer = layer.layer_name, layer.eps, layer.eps_mode, phase
        if capacity and triton_exchange.serves(slices, capacity):
            return TritonExchange(transport, *of_layer, capacity=capacity, running=self._running(x, TYPES))
        if not capacity and len(slices) == 1 and is_plain(slices[0]) and native.supports_call(*slices[0][:3]):
            return NativeExchange(transport, *of_layer, running=self._running(x, CODES))
        return Exchange(transport, *of_layer, capacity=capacity)

    def _running(self, x: Tensor, types: Collection[torch.dtype]) -> Running | None:
        """The running statistics that a plain call updates itself."""
        is_updated = self.deferred is None and self.accumulator is None
        return running_stats.in_place_buffers(self.layer, x, types) if is_updated else None

    def _finish(self, exchange: Exchange, *, has_graph: bool) -> ChannelMoments | None:
        """Record the exchange for checkpoints; return the moments to update the running statistics with, if any."""
        if self.accumulator is not None:
            self.accumulator.add(exchange.moments.on_host())
            return None
        collectives.record_ddp_wrapper()
        exchange_cache.add(exchange, has_graph=has_graph)
        if exchange.has_updated_running or not self.layer.training:
            return None
        return exchange.moments if self.deferred is None else self.deferred.add(exchange.moments)


def _outputs(slices: list[Slice], exchange: Exchange) -> list[Tensor]:
    if isinstance(exchange, PlainExchange):
        return [plain_batch_norm(exchange, *slices[0][:3])]
    return batch_norm(slices, exchange)
