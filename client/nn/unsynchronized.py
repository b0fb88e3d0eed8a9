"""A layer with nobody to synchronise with: torch's own batch norm, to the last bit, without two of its faults."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from client.nn import running_stats
from client.nn.interception import Handed, unseen
from client.nn.micro_batches import Deferred
from client.ops import engine
from client.ops.checkpointing import is_inside_backward


def forward(layer: Any, x: Tensor, deferred: Deferred | None = None) -> Tensor:
    """Normalises `x`, shape (N, C, *), as torch's layer does; in training `deferred` says when its buffers move.

    Args:
        layer: an `nn.BatchNorm2d` or the like, or what has been handed over in its name.
        x: the input.
        deferred: None where each call moves the buffers.
    """
    if not torch.compiler.is_compiling():
        # The `forward` of another layer may be under way, around this one, and is not to take the call for its own.
        return unseen(_forward, layer, x, deferred)
    if layer.training and layer.momentum is None:
        return _with_cumulative_average(layer, x)
    return _by_torch(layer, x)


def _forward(layer: Any, x: Tensor, deferred: Deferred | None) -> Tensor:
    if layer.training and is_inside_backward():
        return _without_moving(layer, x)
    if layer.training and deferred is not None:
        return _deferred(layer, x, deferred)
    return _by_torch(layer, x)


def _by_torch(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, Handed):
        return layer.forward()
    return nn.modules.batchnorm._BatchNorm.forward(layer, x)  # noqa: SLF001 - as torch's own


def _without_moving(layer: Any, x: Tensor) -> Tensor:
    """Where a checkpoint computes again, the running statistics have moved already (pytorch#96136)."""
    mean, variance = (None if kept is None else kept.clone() for kept in (layer.running_mean, layer.running_var))
    return F.batch_norm(x, mean, variance, layer.weight, layer.bias, training=True, eps=layer.eps)


def _deferred(layer: Any, x: Tensor, deferred: Deferred) -> Tensor:
    output = _without_moving(layer, x)
    # As for calls with company or a mask: a mini-batch may have both kinds.
    if due := deferred.add(engine.moments(x.detach())):
        running_stats.move_by(layer, due)
    return output


def _with_cumulative_average(layer: Any, x: Tensor) -> Tensor:
    """A cumulative average needs a number that the compiler does not know (pytorch#194504)."""
    mean, variance = (
        None if kept is None else torch.zeros_like(kept) for kept in (layer.running_mean, layer.running_var)
    )
    output = F.batch_norm(x, mean, variance, layer.weight, layer.bias, training=True, momentum=1.0, eps=layer.eps)
    if mean is not None and variance is not None:
        running_stats.move(layer, mean, variance, has_values=x.numel() > 0)
    return output
