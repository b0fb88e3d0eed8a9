"""Calls without other ranks: torch's own batch norm, bit for bit, with two of its faults avoided."""

import logging
import os
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, distributed, nn

from client.nn import running_stats
from client.nn.override import BatchNormCall, without_override
from client.nn.running_stats import DeferredUpdate
from client.ops import engine
from client.ops.checkpointing import is_inside_backward
from client.session.current import latest_connection

logger = logging.getLogger("statsd_bn.client")


def forward(layer: Any, x: Tensor, deferred: DeferredUpdate | None = None) -> Tensor:
    """Normalise `x`, shape (N, C, *), as torch's layer does; `layer` may be a `BatchNormCall`."""
    if not torch.compiler.is_compiling():
        # An enclosing layer's override must not mistake this call for its own.
        return without_override(_forward, layer, x, deferred)
    if layer.training and layer.momentum is None:
        return _forward_with_cumulative_average(layer, x)
    return _forward_of_torch(layer, x)


def _forward(layer: Any, x: Tensor, deferred: DeferredUpdate | None) -> Tensor:
    if layer.training and is_inside_backward():
        return _forward_without_update(layer, x)
    if layer.training and deferred is not None:
        output = _forward_without_update(layer, x)
        # The same moments as in synchronised calls, because a mini-batch may contain both kinds.
        if due := deferred.add(engine.moments(x.detach())):
            running_stats.update_from(layer, due)
        return output
    return _forward_of_torch(layer, x)


def _forward_of_torch(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, BatchNormCall):
        return layer.forward()
    return nn.modules.batchnorm._BatchNorm.forward(layer, x)  # noqa: SLF001 - as torch's own


def _forward_without_update(layer: Any, x: Tensor) -> Tensor:
    """For calls that a checkpoint recomputes: the running statistics were updated before (pytorch#96136)."""
    mean, variance = (None if buffer is None else buffer.clone() for buffer in (layer.running_mean, layer.running_var))
    return F.batch_norm(x, mean, variance, layer.weight, layer.bias, training=True, eps=layer.eps)


def _forward_with_cumulative_average(layer: Any, x: Tensor) -> Tensor:
    """For torch.compile, which does not know the weight of a cumulative average (pytorch#194504)."""
    mean, variance = (
        None if buffer is None else torch.zeros_like(buffer) for buffer in (layer.running_mean, layer.running_var)
    )
    output = F.batch_norm(x, mean, variance, layer.weight, layer.bias, training=True, momentum=1.0, eps=layer.eps)
    if mean is not None and variance is not None:
        running_stats.update(layer, mean, variance, has_values=x.numel() > 0)
    return output


class UnconnectedWarning:
    """Warning, logged once, that this process trains alone although its job has others."""

    def __init__(self) -> None:
        self._is_logged = False

    def log_once(self, layer: str) -> None:
        """Log the warning if the job has other processes and this one has never been connected to them.

        torch's process group may be initialised after the first forward pass, so each call checks it.
        """
        latest = latest_connection()
        if self._is_logged or (latest and latest.is_explicitly_alone) or not (evidence := self._evidence_of_others()):
            return
        self._is_logged = True
        if latest is None:
            problem, remedy = "this process is not connected", "call client.connect() before training"
        elif latest.is_in_process:
            problem, remedy = "client.connect() found no other process", "call it after init_process_group()"
        else:
            return
        logger.warning("%s, and %s: layer %r is not synchronised; %s", evidence, problem, layer, remedy)

    @cached_property
    def _evidence_of_launcher(self) -> str:
        processes = os.environ.get("WORLD_SIZE", "")
        return f"WORLD_SIZE is {processes}" if processes.isdecimal() and int(processes) > 1 else ""

    def _evidence_of_others(self) -> str:
        """Evidence of other processes from the launcher or torch's process group; "" without any."""
        if self._evidence_of_launcher or not (distributed.is_available() and distributed.is_initialized()):
            return self._evidence_of_launcher
        size = distributed.get_world_size()
        return f"torch's process group has {size} ranks" if size > 1 else ""


unconnected_warning = UnconnectedWarning()


def warn_if_unconnected(layer: str) -> None:
    """Log the warning, see `UnconnectedWarning.log_once`."""
    unconnected_warning.log_once(layer)


# torch.compile evaluates the function while it traces. `torch.compiler.assume_constant_result` sets the same attribute,
# but imports the compiler.
warn_if_unconnected._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
