"""Programs of `test_non_finite.py`: one process contributes NaN or infinity in its second step."""

import logging
import os
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import client
from client.ops import non_finite
from statsd_bn.errors import NonFinite
from support.sentences import client_log

CHANNELS = 4
NAME = "layer3.0.bn1"


def three_steps(process: Any, value: float, phase: str, bearers: list[int], policy: str, how: str = "plain") -> Any:
    """The log lines, the errors, the number of updates of the running statistics, and the process id."""
    raised = []
    layer = client.SynchronizedBatchNorm1d(CHANNELS)
    layer.layer_name = NAME
    non_finite._local_reports.clear()
    with client_log(logging.INFO) as records, mock.patch.dict(os.environ, {"STATSD_BN_ON_NONFINITE": policy}):
        for step in range(3):
            try:
                if how == "and then forward" and step == 2:  # as if all ranks' weights were no longer finite
                    _step(layer, value, "forward", how)
                else:
                    _step(layer, value if step == 1 and process.rank in bearers else 1.0, phase, how)
            except NonFinite as error:
                raised.append((step, error.fields, str(error)))
    lines = [(level, text) for level, text in records if "first non-finite" in text]
    return lines, raised, int(layer.num_batches_tracked), os.getpid()


def _step(layer: nn.Module, value: float, phase: str, how: str) -> None:
    x = torch.randn(6, CHANNELS)
    gradient = torch.randn(6, CHANNELS)
    spoilt = x if phase == "forward" else gradient
    spoilt[2, 1] = value
    x.requires_grad_()
    if how == "masked":
        mask = torch.ones(6, dtype=torch.bool)
        mask[2] = False
        layer(x, mask)
    elif how == "compiled":
        torch.compiler.reset()
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x).backward(gradient)
    elif how == "checkpointed":
        checkpoint(layer, x, use_reentrant=False).backward(gradient)
    elif how == "with a scaler":
        _overflow(layer, x, gradient)
    else:
        layer(x).backward(gradient)


def _overflow(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """One step of AMP, which the scaler skips, since scaled gradients exceed float32."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer.zero_grad()
    before = layer.weight.detach().clone()
    scaler.scale((layer(x) * gradient * 64).sum()).backward()
    assert not layer.bias.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
