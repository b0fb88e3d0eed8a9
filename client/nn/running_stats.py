"""Updates of running statistics after each call or mini-batch, and moments over many batches.

With an update for each micro-batch of a pipeline (GPipe: Huang et al., 2019, section 2.2) the running statistics would
decay `chunks` times faster and miss the variance between micro-batches, so a `DeferredUpdate` adds their moments.
"""

import itertools
import math
import threading
from collections.abc import Collection
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from client.ops.statistics import ChannelMoments, Running, compute_type, to_compute_type
from statsd_bn.reduction import Moments

_TENSOR_TYPES = frozenset({Tensor, nn.Parameter})

_numbers = itertools.count(1)

# By number, because operators of torch.compile receive plain values only.
deferred_updates: "WeakValueDictionary[int, DeferredUpdate]" = WeakValueDictionary()


class DeferredUpdate:
    """Pending moments of a mini-batch of `chunks` micro-batches; the replicas of one forward pass share it."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.number = next(_numbers)
        self._pending: ChannelMoments | None = None
        self._calls = 0
        self._lock = threading.Lock()
        deferred_updates[self.number] = self

    def __reduce__(self) -> Any:
        """Copy without pending moments; copies of a parametrized layer include this object."""
        return type(self), (self.chunks,)

    def add(self, micro_batch: ChannelMoments) -> ChannelMoments | None:
        """Add a micro-batch; return the moments of the whole mini-batch after its last micro-batch, None before."""
        with self._lock:
            self._pending = micro_batch if self._pending is None else self._pending.merge(micro_batch)
            self._calls += 1
            return self._pop() if self._calls == self.chunks else None

    def pop(self) -> ChannelMoments | None:
        """Remove and return the pending moments, or None; the next micro-batch starts a new mini-batch."""
        with self._lock:
            return self._pop()

    def _pop(self) -> ChannelMoments | None:
        pending, self._pending, self._calls = self._pending, None, 0
        return pending


def check_chunks(chunks: int) -> None:
    """Raise TypeError or ValueError unless `chunks` is a positive int."""
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        raise TypeError(f"chunks: expected an int, the micro-batches per mini-batch, got {chunks!r}")
    if chunks < 1:
        raise ValueError(f"chunks: expected at least 1 micro-batch per mini-batch, got {chunks}")


class MomentAccumulator:
    """Moments of one layer over many batches, while `recalibrate` runs a model over them."""

    def __init__(self) -> None:
        self.moments: Moments | None = None
        self._lock = threading.Lock()

    def add(self, batch: Moments) -> None:
        """Add a batch; replicas of torch's own DataParallel may call it concurrently."""
        with self._lock:
            self.moments = batch if self.moments is None else self.moments.merge(batch)


def update_from(layer: Any, batch: ChannelMoments) -> None:
    """Update a layer's running statistics with the moments of a batch."""
    running = layer.running_mean
    if running is not None:
        batch = batch.beside(running)
    mean, variance = batch.mean(), batch.variance(unbiased=True)  # NaN without values
    if running is not None:
        mean, variance = to_compute_type(running, mean, variance)
    # A count on a device is NaN after a failed round, which must not update anything.
    has_succeeded = 1 if isinstance(batch.count, int) else (~batch.count.isnan()).long()
    update(layer, mean, variance, is_due=has_succeeded, has_values=batch.count > 0)


def update(layer: Any, mean: Tensor, variance: Tensor, *, is_due: int | Tensor = 1, has_values: bool | Tensor) -> None:
    """Update a layer's running statistics with a batch's mean and unbiased variance, shape (C,), as torch does.

    Reads no value of a tensor, because torch.compile may trace this function. If `is_due` is 0, nothing changes;
    if `has_values` is False, only the count of batches changes.
    """
    if not layer.track_running_stats:  # scripts switch it off temporarily
        return
    tracked = layer.num_batches_tracked
    if tracked is not None:
        tracked.add_(is_due.to(tracked.device) if isinstance(is_due, Tensor) else is_due)
    running_mean, running_var = layer.running_mean, layer.running_var
    if running_mean is None or running_var is None:
        return
    updates = is_due * has_values
    if not isinstance(updates, Tensor) and not updates:
        return
    momentum = _momentum(layer)
    for running, newest in ((running_mean, mean), (running_var, variance)):
        # In half precision `newest` may overflow where the average does not.
        dtype = compute_type(running)
        wide = running if running.dtype == dtype else running.to(dtype)
        target = newest if newest.dtype == dtype and newest.is_cpu and wide.is_cpu else newest.to(wide)
        weight = momentum.to(wide) if isinstance(momentum, Tensor) else momentum
        if isinstance(updates, Tensor):  # a weight of 0 would turn infinity into NaN
            wide = torch.where(updates.bool().to(wide.device), wide.lerp(target, weight), wide)
        else:
            wide.lerp_(target, weight)
        if wide is not running:
            running.copy_(wide)


def _momentum(layer: Any) -> float | Tensor:
    if layer.momentum is not None:
        return float(layer.momentum)
    tracked = layer.num_batches_tracked
    if tracked is None:
        return 0.0
    # MPS has no float64.
    number: Tensor = (tracked.cpu() if tracked.device.type == "mps" else tracked).double()
    return 1.0 / number.clamp(min=1)  # `number` is 0 until the first mini-batch has ended


def in_place_buffers(layer: Any, x: Tensor, types: Collection[torch.dtype]) -> Running | None:
    """Buffers that a backend for `types` can update, empty if none are updated; None if the layer must update them."""
    if not (layer.training and layer.track_running_stats):
        return Running()
    mean, var, tracked = _buffers_of(layer)
    if mean is None or var is None:
        mean = var = None
    elif mean.dtype not in types or var.dtype != mean.dtype:
        return None
    if tracked is not None and tracked.dtype != torch.int64:
        return None
    is_cpu, channels = x.is_cpu, x.shape[1:2]
    for buffer, shape in ((mean, channels), (var, channels), (tracked, ())):
        if buffer is not None and not (
            type(buffer) in _TENSOR_TYPES
            and (buffer.is_cpu if is_cpu else buffer.device == x.device)
            and buffer.is_contiguous()
            and buffer.shape == shape
            and not (buffer.is_neg() or buffer.is_inference() or buffer.requires_grad)
        ):
            return None
    return Running(mean, var, tracked, math.nan if layer.momentum is None else float(layer.momentum))


def _buffers_of(layer: Any) -> tuple[Any, Any, Any]:
    """Running mean, variance and counter of a layer; see `input_checks.parameters_of`."""
    buffers = getattr(layer, "_buffers", {})
    if "running_mean" in buffers and "running_var" in buffers and "num_batches_tracked" in buffers:
        return buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    return layer.running_mean, layer.running_var, layer.num_batches_tracked
