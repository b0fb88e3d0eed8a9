"""Subclass: what a converted subclass of torch's batch norm costs beside our own layer.

Forward and backward of a small input, over the in-process lane, with one replica that believes it has company: so the
exchange costs nothing, and what is left is the layer. All take turns in one run, call by call, so that what else the
machine does falls on all; the claim is the median of the differences within a turn, not a time, and that over several
processes. What the subclass costs beside torch's layer without us is measured in the same turns, and what the same
steps cost around our layer, as somebody would write them by hand: there they are as cold as in the subclass.
"""

import argparse
import gc
import json
import multiprocessing
import os
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

WARM_UP = 200


class Inherited(nn.BatchNorm2d):
    """Has no forward of its own."""


class BySuper(nn.BatchNorm2d):
    """Calls torch's forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises."""
        return super().forward(x)


class Functional(nn.BatchNorm2d):
    """Counts, and calls `F.batch_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, *tensors, self.training, self.momentum, self.eps)


class LikeTimms(nn.BatchNorm2d):
    """Looks at its input, and has two modules of its own, as timm's BatchNormAct2d; here they do nothing."""

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


class AroundOurs(client.SynchronizedBatchNorm2d):
    """What LikeTimms does beside normalising, written around our layer, which counts batches itself."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.drop = nn.Identity()
        self.act = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Normalises."""
        torch._assert(x.ndim == 4, f"expected 4 dimensions, got {x.ndim}")  # type: ignore[no-untyped-call]  # noqa: SLF001 - as timm does
        found: Tensor = self.act(self.drop(super().forward(x)))
        return found


SUBCLASSES = [Inherited, BySuper, Functional, LikeTimms]


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["2,8,4,4", "2,64,7,7"])
    parser.add_argument("--calls", type=int, default=150, help="of each layer in each process")
    parser.add_argument("--processes", type=int, default=20, help="one after the other; the figures are their medians")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [row for shape in options.shapes for row in medians(shape, options.calls, options.processes)]
    if options.json:
        print(json.dumps({"load": load, "rows": rows}, indent=2))
        return
    print(f"load average before: {load:.1f}")
    print(
        f"{'shape':>9} {'subclass':>10} {'ours us':>8} {'converted':>9} {'more':>6} {'torch us':>8} {'without us':>10} "
        f"{'around ours':>11}"
    )
    for row in rows:
        print(
            f"{row['shape']:>9} {row['subclass']:>10} {row['ours']:>8.0f} {row['converted']:>9.0f} {row['more']:>6.1f} "
            f"{row['torch']:>8.0f} {row['more_without_us']:>10.1f} "
            f"{row['more_around_ours']:>11.1f}"
        )


def medians(shape: str, calls: int, processes: int) -> list[dict[str, Any]]:
    """Returns the medians of what several processes measure.

    Within one, layers of the same class differ by up to 5 µs for as long as it lives: by where they lie in memory, and
    by which attributes of theirs meet in the interpreter's cache.
    """
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, new, max_tasks_per_child=1) as executor:
        runs = list(executor.map(measure, [shape] * processes, [calls] * processes))
    return [{name: _middle([row[name] for row in rows]) for name in rows[0]} for rows in zip(*runs, strict=True)]


def _middle(found: list[Any]) -> Any:
    """The median; of texts, which are all the same, the first."""
    return found[0] if isinstance(found[0], str) else statistics.median(found)


def measure(shape: str, calls: int) -> list[dict[str, Any]]:
    """Returns a row for each subclass, in microseconds a call, forward and backward."""
    torch.set_num_threads(1)
    _shuffle_attributes()
    x = torch.randn(*map(int, shape.split(",")))
    channels = x.shape[1]
    layers: dict[str, nn.Module] = {"torch": nn.BatchNorm2d(channels), "ours": client.SynchronizedBatchNorm2d(channels)}
    layers["around ours"] = AroundOurs(channels)
    for kind in SUBCLASSES:
        layers[kind.__name__] = kind(channels)
        layers[f"converted {kind.__name__}"] = client.convert_model(kind(channels))
    steps = {name: _step(layer, x) for name, layer in layers.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)  # noqa: S311 - no secret
    with mock.patch.object(client.SynchronizedBatchNorm, "_has_company", _believe):
        gc.disable()  # else it falls on whoever comes next
        for turn in range(WARM_UP + calls):
            for name, run in order.sample(list(steps.items()), len(steps)):  # who comes after whom makes a difference
                began = time.perf_counter()
                run()
                if turn >= WARM_UP:
                    times[name].append((time.perf_counter() - began) * 1e6)
            if turn % 100 == 0:
                gc.collect()
        gc.enable()
    return [_row(shape, kind.__name__, times) for kind in SUBCLASSES]


def _shuffle_attributes() -> None:
    """Makes it chance, in each process anew, which attributes of the layers' classes meet in the interpreter's cache.

    It has 4,096 places for (class, name), by the number that a class gets when it is first asked for an attribute.
    Without this the numbers would be the same in all processes, and whether "ours" is lucky a matter of the version.
    """
    for _ in range(random.SystemRandom().randrange(4096)):
        getattr(type("Another", (), {}), "anything", None)


def _row(shape: str, name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    converted = times[f"converted {name}"]
    return {
        "shape": shape,
        "subclass": name,
        "ours": statistics.median(times["ours"]),
        "converted": statistics.median(converted),
        "more": _apart(converted, times["ours"]),
        "torch": statistics.median(times["torch"]),
        "more_without_us": _apart(times[name], times["torch"]),
        "more_around_ours": _apart(times["around ours"], times["ours"]) if name == LikeTimms.__name__ else 0.0,
    }


def _apart(some: list[float], others: list[float]) -> float:
    """The median of the differences within a turn."""
    return statistics.median(one - other for one, other in zip(some, others, strict=True))


def _step(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    leaf, grad = x.clone().requires_grad_(), torch.randn(x.shape)

    def run() -> None:
        layer(leaf).backward(grad)
        leaf.grad = None

    return run


def _believe(*_: Any) -> bool:
    return True


if __name__ == "__main__":
    main()
