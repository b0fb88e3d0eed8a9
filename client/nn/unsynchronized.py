"""Calls without other ranks: torch's batch norm to the bit, without two of its faults (pytorch#194504, #96136)."""

import logging
import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, distributed, nn

from client.nn import running_stats
from client.nn.input_checks import constant_in_trace
from client.nn.override import BatchNormCall, without_override
from client.nn.running_stats import DeferredUpdate
from client.ops import engine
from client.ops.checkpointing import is_inside_backward
from client.session.connection import latest_connection

logger = logging.getLogger("statsd_bn.client")


def forward(layer: Any, x: Tensor, deferred: DeferredUpdate | None = None) -> Tensor:
    """Normalise `x`, shape (N, C, *), as torch's layer does; `layer` may be a `BatchNormCall`."""
    if not torch.compiler.is_compiling():
        # An enclosing layer's override must not mistake this call for its own.
        return without_override(_forward, layer, x, deferred)
    if layer.training and layer.momentum is None:
        # The compiler does not know the weight of a cumulative average (pytorch#194504).
        output, mean, variance = _forward_apart(layer, x)
        if mean is not None and variance is not None:
            running_stats.update(layer, mean, variance, has_values=x.numel() > 0)
        return output
    return _forward_of_torch(layer, x)


def _forward(layer: Any, x: Tensor, deferred: DeferredUpdate | None) -> Tensor:
    if layer.training and is_inside_backward():
        # A checkpoint recomputes the call; its first run has updated the running statistics (pytorch#96136).
        return _forward_apart(layer, x)[0]
    if layer.training and deferred is not None:
        output, _, _ = _forward_apart(layer, x)
        # The same moments as in synchronised calls: a mini-batch may contain synchronised and unsynchronised calls.
        if due := deferred.add(engine.moments(x.detach())):
            running_stats.update_from(layer, due)
        return output
    return _forward_of_torch(layer, x)


def _forward_of_torch(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, BatchNormCall):
        return layer.forward()
    return nn.modules.batchnorm._BatchNorm.forward(layer, x)  # noqa: SLF001 - as torch's own


def _forward_apart(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Normalise a batch, and return its mean and unbiased variance instead of updating the running statistics."""
    buffers = layer.running_mean, layer.running_var
    mean, variance = (None if buffer is None else torch.zeros_like(buffer) for buffer in buffers)
    output = F.batch_norm(x, mean, variance, layer.weight, layer.bias, training=True, momentum=1.0, eps=layer.eps)
    return output, mean, variance


_warned_of: list[str] = []  # the layer that the warning named, once it was logged


@constant_in_trace
def warn_if_unconnected(layer: str) -> None:
    """Log once that this process trains alone although its job has other processes.

    Each call checks it, because torch's process group may be initialised after the first one.
    """
    latest = latest_connection()
    if _warned_of or (latest and latest.is_explicitly_alone) or not (evidence := _evidence_of_others()):
        return
    _warned_of.append(layer)
    if latest is None:
        problem, remedy = "this process is not connected", "call client.connect() before training"
    elif latest.is_in_process:
        problem, remedy = "client.connect() found no other process", "call it after init_process_group()"
    else:  # it was connected to these processes before
        return
    logger.warning("%s, and %s: layer %r is not synchronised; %s", evidence, problem, layer, remedy)


def _evidence_of_others() -> str:
    """Evidence of other processes from the launcher or torch's process group; "" without any."""
    if (processes := _world_size_of_launcher()) > 1:
        return f"WORLD_SIZE is {processes}"
    is_initialized = distributed.is_available() and distributed.is_initialized()
    size = distributed.get_world_size() if is_initialized else 1
    return f"torch's process group has {size} ranks" if size > 1 else ""


@cache
def _world_size_of_launcher() -> int:
    processes = os.environ.get("WORLD_SIZE", "")
    return int(processes) if processes.isdecimal() else 1
