"""Time per call of converted subclasses of torch's batch norm, compared with our layer and with the unconverted class.

A call is forward and backward of a small input with one member, whose exchange costs nothing. In each turn all layers
run once, in random order. The result is the median difference from our layer within a turn, over several processes.
"""

import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import client

SHAPES = ["2,8,4,4", "2,64,7,7"]
WARM_UP = 200
PROCESSES = 20

Row = dict[str, Any]


class Inherited(nn.BatchNorm2d):
    """Inherits torch's forward."""


class BySuper(nn.BatchNorm2d):
    """Calls torch's forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises."""
        return super().forward(x)


class Functional(nn.BatchNorm2d):
    """Counts batches, and calls `F.batch_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, *tensors, self.training, self.momentum, self.eps)


class LikeTimms(nn.BatchNorm2d):
    """Checks its input and calls two modules, like timm's `BatchNormAct2d`; here they are identities."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.drop = nn.Identity()
        self.act = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Normalises."""
        torch._assert(x.ndim == 4, f"expected 4 dimensions, got {x.ndim}")  # type: ignore[no-untyped-call]  # noqa: SLF001 - as timm does
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        x = F.batch_norm(x, *tensors, self.training, factor, self.eps)
        found: Tensor = self.act(self.drop(x))
        return found


# Converting the first one gives our layer.
CLASSES = [nn.BatchNorm2d, Inherited, BySuper, Functional, LikeTimms]


def measured(calls: int) -> list[Row]:
    """Returns a row for each shape and class: medians over several processes, in microseconds per call.

    Equal layers differ by up to 5 µs throughout a process, depending on their addresses, and on which of their
    attributes collide in the interpreter's cache.
    """
    rows = []
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, new, max_tasks_per_child=1) as executor:
        for shape in SHAPES:
            runs = list(executor.map(_measure, [shape] * PROCESSES, [calls] * PROCESSES))
            rows += [
                {"shape": shape, "class": name, **{column: _median(runs, name, column) for column in runs[0][name]}}
                for name in runs[0]
            ]
    return rows


def _median(runs: list[dict[str, dict[str, float]]], name: str, column: str) -> float:
    return statistics.median(run[name][column] for run in runs)


def _measure(shape: str, calls: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    _shuffle_attributes()
    x = torch.randn(*map(int, shape.split(",")))
    steps: dict[tuple[str, bool], Callable[[], None]] = {}
    for kind in CLASSES:
        for converts in (False, True):
            layer = kind(x.shape[1])
            steps[kind.__name__, converts] = _step(client.convert_model(layer) if converts else layer, x)
    times = _times(steps, calls)
    ours = times[CLASSES[0].__name__, True]
    return {
        kind.__name__: {
            "plain": statistics.median(times[kind.__name__, False]),
            "converted": statistics.median(times[kind.__name__, True]),
            "more": statistics.median(a - b for a, b in zip(times[kind.__name__, True], ours, strict=True)),
        }
        for kind in CLASSES
    }


def _times(steps: dict[tuple[str, bool], Callable[[], None]], calls: int) -> dict[tuple[str, bool], list[float]]:
    times: dict[tuple[str, bool], list[float]] = {each: [] for each in steps}
    order = random.Random(0)  # noqa: S311 - no secret
    with mock.patch.object(client.SynchronizedBatchNorm, "_must_synchronise", _believe):
        gc.disable()  # a collection would slow the layer that runs next
        for turn in range(WARM_UP + calls):
            for each, run in order.sample(list(steps.items()), len(steps)):  # the layer before it makes a difference
                began = time.perf_counter()
                run()
                if turn >= WARM_UP:
                    times[each].append((time.perf_counter() - began) * 1e6)
            if turn % 100 == 0:
                gc.collect()
        gc.enable()
    return times


def _believe(*_: Any) -> bool:
    return True


def _shuffle_attributes() -> None:
    """Randomises which attributes of the layers' classes collide in the interpreter's cache.

    The cache has 4,096 entries for (class, name), chosen by a number that a class gets at its first attribute access.
    Otherwise these numbers, and so the collisions, would be the same in all processes.
    """
    for _ in range(random.SystemRandom().randrange(4096)):
        getattr(type("Another", (), {}), "anything", None)


def _step(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    leaf, grad = x.clone().requires_grad_(), torch.randn(x.shape)

    def run() -> None:
        layer(leaf).backward(grad)
        leaf.grad = None

    return run
