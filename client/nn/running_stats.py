"""Running statistics: what a layer keeps of the batches it has seen, for eval."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from client.ops.statistics import ChannelMoments, Running, compute_type, to_compute_type, vector_device

_TORCHS = frozenset({Tensor, nn.Parameter})
_COUNTERS = frozenset({torch.int64})


def move_by(layer: Any, batch: ChannelMoments) -> None:
    """Moves a layer's running statistics towards those of this batch."""
    running = layer.running_mean
    if running is not None:
        batch = batch.on(vector_device(running))
    mean, variance = newest(batch)
    if running is not None:
        mean, variance = to_compute_type(running, mean, variance)
    if isinstance(batch.count, int):
        move(layer, mean, variance, has_values=batch.count > 0)
        return
    # The device decides whether anything moves: a round that has failed moves nothing.
    has_ended_well = (~batch.count.isnan()).long()
    move(layer, mean, variance, is_due=has_ended_well, has_values=batch.count > 0)


def newest(batch: ChannelMoments) -> tuple[Tensor, Tensor]:
    """Returns what running statistics move towards: mean and unbiased variance, shape (C,); NaN without values."""
    return batch.mean(), batch.variance(unbiased=True)


def in_place(layer: Any, x: Tensor, types: Collection[torch.dtype]) -> Running | None:
    """Returns the buffers that the forward pass of an input can move itself; None where it cannot.

    It cannot where the buffers are elsewhere, or of another shape or type than a backend moves.

    Args:
        layer: as for `move`.
        x: the input.
        types: of running mean and variance.
    """
    if not (layer.training and layer.track_running_stats):
        return Running()
    mean, var, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
    device = x.device
    if tracked is not None and not _is_beside(device, tracked, _COUNTERS, ()):
        return None
    if mean is None or var is None:
        return Running(tracked=tracked)
    channels = x.shape[1:2]
    if not (_is_beside(device, mean, types, channels) and _is_beside(device, var, (mean.dtype,), channels)):
        return None
    return Running(mean, var, tracked, math.nan if layer.momentum is None else float(layer.momentum))


def _is_beside(device: torch.device, kept: Tensor, types: Collection[torch.dtype], shape: tuple[int, ...]) -> bool:
    return (
        type(kept) in _TORCHS
        and kept.device == device
        and kept.dtype in types
        and kept.shape == shape
        and kept.is_contiguous()
        and not (kept.is_inference() or kept.requires_grad or kept.is_neg())
    )


def move(layer: Any, mean: Tensor, variance: Tensor, *, is_due: int | Tensor = 1, has_values: bool | Tensor) -> None:
    """Moves a layer's running statistics towards those of the newest batch, as torch does.

    The numbers may be tensors that a compiler has yet to compute, so nothing here asks for their values.

    Args:
        layer: with the attributes of an `nn.BatchNorm2d`; without `track_running_stats` nothing moves.
        mean: shape (C,).
        variance: shape (C,), unbiased.
        is_due: 1, or 0 where nothing moves: a checkpoint computes the call again, or the mini-batch goes on.
        has_values: whether there was any value in the batch; an empty one is counted, and moves nothing.
    """
    if not layer.track_running_stats:  # it may be switched off for a while in a layer that has them
        return
    tracked = layer.num_batches_tracked
    if tracked is not None:
        tracked.add_(is_due.to(tracked.device) if isinstance(is_due, Tensor) else is_due)
    running_mean, running_var = layer.running_mean, layer.running_var
    if running_mean is None or running_var is None:
        return
    moves = is_due * has_values
    if not isinstance(moves, Tensor) and not moves:
        return
    weight = _weight_of_newest(layer)
    for running, batch in ((running_mean, mean), (running_var, variance)):
        # In half precision the newest may overflow where the average does not.
        dtype = compute_type(running)
        wide = running if running.dtype == dtype else running.to(dtype)
        target = batch if batch.dtype == dtype and batch.is_cpu and wide.is_cpu else batch.to(wide)
        by = weight.to(wide) if isinstance(weight, Tensor) else weight
        if isinstance(moves, Tensor):  # a weight of 0 would make NaN of infinity
            wide = torch.where(moves.bool().to(wide.device), wide.lerp(target, by), wide)
        else:
            wide.lerp_(target, by)
        if wide is not running:
            running.copy_(wide)


def _weight_of_newest(layer: Any) -> float | Tensor:
    if layer.momentum is not None:
        return float(layer.momentum)
    tracked = layer.num_batches_tracked
    if tracked is None:
        return 0.0
    # MPS has no float64, and from there the host has to fetch it.
    number: Tensor = (tracked.cpu() if tracked.device.type == "mps" else tracked).double()
    return 1.0 / number.clamp(min=1)  # none is tracked yet while the first mini-batch goes on
