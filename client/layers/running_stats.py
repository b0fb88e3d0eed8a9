"""Running statistics: what a layer keeps of the batches it has seen, for eval."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.kernels.vectors import compute_type, to_device
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray


def newest(batch: Moments) -> tuple[FloatArray, FloatArray]:
    """Returns what running statistics move towards: mean and unbiased variance, shape (C,); zeros without values."""
    if batch.count == 0:
        nothing = np.zeros_like(batch.sums)
        return nothing, nothing
    return batch.mean, batch.variance(unbiased=True)


def move_by(layer: Any, batch: Moments) -> None:
    """Moves a layer's running statistics towards those of this batch."""
    kept = torch.empty(0) if layer.running_mean is None else layer.running_mean
    mean, variance = to_device(kept, *newest(batch))
    move(layer, mean, variance, has_values=batch.count > 0)


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
        wide = running.to(compute_type(running))  # in half precision the newest may overflow where the average does not
        target = batch.to(wide)
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
    number: Tensor = tracked.cpu().double()
    return 1.0 / number.clamp(min=1)  # none is tracked yet while the first mini-batch goes on
