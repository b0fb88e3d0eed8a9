"""Bare: a layer in Python that has nothing but our arithmetic, beside torch's and ours: what ours cannot fall below.

One function of autograd, with the operators of `client.kernels.cpu` and what comes between them in numpy. It knows no
mask, no group and no other replica, exchanges nothing and checks nothing. All take turns in one run, call by call.
"""

import argparse
import json
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import client
from client.kernels import cpu

SHAPES = ["2,64,7,7", "256,1024", "8,2048,7,7"]
WARM_UP = 50


class Normalise(torch.autograd.Function):
    """Batch norm of one slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kept: list[Tensor], eps: float) -> Tensor:
        """Normalises, and moves the running statistics."""
        number = x.numel() // x.shape[1]
        first, second = cpu.sums(x, x) / number
        variance = second - first * first
        invstd = 1 / np.sqrt(variance + eps)
        factor = invstd * weight.detach().numpy()
        for running, found in zip(kept, (first, variance * (number / (number - 1))), strict=True):
            running.lerp_(torch.from_numpy(found.astype(np.float32)), 0.1)
        ctx.save_for_backward(x)
        ctx.kept = number, first, invstd, factor
        output = cpu.normalise_small(x, first, invstd, weight, bias)
        return cpu.scale(x, factor, bias.detach().numpy() - first * factor) if output is None else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradients of input, weight and bias."""
        (x,) = ctx.saved_tensors
        number, mean, invstd, factor = ctx.kept
        by_bias, raw = cpu.sums(grad, x)
        by_weight = (raw - mean * by_bias) * invstd
        by_x = -factor * invstd * by_weight / number
        by_input = cpu.combine(grad, x, factor, by_x, -factor * by_bias / number - by_x * mean)
        return by_input, _tensor(by_weight), _tensor(by_bias), None, None


_normalise: Any = Normalise.apply


class Bare(nn.BatchNorm2d):
    """A layer that calls it."""

    def forward(self, x: Tensor) -> Tensor:
        """Counts and normalises."""
        tracked: Any = self.num_batches_tracked
        tracked.add_(1)
        found: Tensor = _normalise(x, self.weight, self.bias, [self.running_mean, self.running_var], self.eps)
        return found


def main() -> None:
    """Measures each shape and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--calls", type=int, default=1000, help="of each layer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with mock.patch.object(client.SynchronizedBatchNorm, "_has_company", _believe):
        rows = [measure(shape, options.calls) for shape in options.shapes]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'shape':>12} {'torch us':>9} {'bare us':>9} {'ours us':>9} {'bare / torch':>13} {'ours / torch':>13}")
    for row in rows:
        ratios = (row[way] / row["torch"] for way in ("bare", "ours"))
        print(
            f"{row['shape']:>12}",
            *(f"{row[way]:>9.0f}" for way in ("torch", "bare", "ours")),
            *map("{:>13.2f}".format, ratios),
        )


def measure(shape: str, calls: int) -> dict[str, Any]:
    """Returns the medians of forward and backward together, in microseconds."""
    x, grad = torch.randn(2, *map(int, shape.split(",")))
    channels = x.shape[1]
    torchs, ours = (
        (nn.BatchNorm1d, client.SynchronizedBatchNorm1d)
        if x.dim() == 2
        else (nn.BatchNorm2d, client.SynchronizedBatchNorm2d)
    )
    layers: dict[str, nn.Module] = {"torch": torchs(channels), "bare": Bare(channels), "ours": ours(channels)}
    leaves = {name: x.clone().requires_grad_() for name in layers}
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(WARM_UP + calls):
        for name, layer in layers.items():
            leaves[name].grad = None
            began = time.perf_counter()
            layer(leaves[name]).backward(grad)
            times[name].append((time.perf_counter() - began) * 1e6)
    _compare(layers, leaves)
    return {"shape": shape, **{name: statistics.median(found[WARM_UP:]) for name, found in times.items()}}


def _compare(layers: dict[str, nn.Module], leaves: dict[str, Tensor]) -> None:
    """All have computed the same."""
    for name in ("bare", "ours"):
        torch.testing.assert_close(leaves[name].grad, leaves["torch"].grad, rtol=1e-3, atol=1e-4)
        for found, right in zip(layers[name].buffers(), layers["torch"].buffers(), strict=True):
            torch.testing.assert_close(found, right)


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _believe(*_: Any) -> bool:
    return True


if __name__ == "__main__":
    main()
