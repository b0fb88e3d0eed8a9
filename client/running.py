"""Running statistics: what a layer keeps of the batches it has seen, for eval."""

from typing import Any

from torch import Tensor

from client.kernels import compute_type


def move(layer: Any, mean: Tensor, variance: Tensor, *, first_run: int | Tensor = 1, has_values: bool | Tensor) -> None:
    """Moves a layer's running statistics towards those of the newest batch, as torch does.

    The numbers may be tensors that a compiler has yet to compute, so nothing here asks for their values.

    Args:
        layer: with the attributes of an `nn.BatchNorm2d`; without `track_running_stats` nothing moves.
        mean: shape (C,).
        variance: shape (C,), unbiased.
        first_run: 1, or 0 where a checkpoint computes the call again.
        has_values: whether there was any value in the batch; an empty one is counted, and moves nothing.
    """
    if not layer.track_running_stats:  # it may be switched off for a while in a layer that has them
        return
    tracked = layer.num_batches_tracked
    if tracked is not None:
        tracked.add_(first_run.to(tracked.device) if isinstance(first_run, Tensor) else first_run)
    running_mean, running_var = layer.running_mean, layer.running_var
    if running_mean is None or running_var is None:
        return
    moves = first_run * has_values
    weight = _weight_of_newest(layer) * (moves.double() if isinstance(moves, Tensor) else moves)
    for running, batch in ((running_mean, mean), (running_var, variance)):
        wide = running.to(compute_type(running))  # in half precision the newest may overflow where the average does not
        newest = batch.to(wide.dtype).to(wide.device)
        wide.lerp_(newest, weight.to(wide.dtype).to(wide.device) if isinstance(weight, Tensor) else weight)
        if wide is not running:
            running.copy_(wide)


def _weight_of_newest(layer: Any) -> float | Tensor:
    if layer.momentum is not None:
        return float(layer.momentum)
    tracked = layer.num_batches_tracked
    return 0.0 if tracked is None else 1.0 / tracked.cpu().double()
