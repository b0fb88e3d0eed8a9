"""Skew: how soon a replica whose data differ is named, and how often one whose data do not.

A small network trains on the whole batch of eight replicas, or of another number, which is what synchronised batch norm
makes of it. At each look, one in ten steps as once a second in a training of 0.1 s a step, the rows of each replica are
taken from what comes into its batch norms, and go as figures to `statsd_bn.skew`. No process, no socket.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from statsd_bn.skew import figures_of
from statsd_bn.skew.comparison import Comparison
from statsd_bn.skew.few import Apart

REPLICAS, IMAGES = 8, 8
MAX_REPLICAS = 8
STEPS, STEPS_A_LOOK = 1000, 10
CLASSES = 10

# Mean brightness of red, green and blue in photographs, as ImageNet's recipes have it.
BRIGHTNESS = (0.485, 0.456, 0.406)

# From which step on the last replica's data differ: once half from the beginning, once later.
BEGINNINGS = (0, 500)

Batch = tuple[Tensor, Tensor]


def digits(chance: torch.Generator, replicas: int) -> Iterator[Batch]:
    """Batches of handwritten digits, (replicas * 8, 1, 8, 8), drawn at random."""
    pixels, labels = _all_digits()
    while True:
        drawn = torch.randint(len(labels), (replicas * IMAGES,), generator=chance)
        yield pixels[drawn], labels[drawn]


def _all_digits() -> Batch:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def fixed_digits(chance: torch.Generator, replicas: int) -> Iterator[Batch]:
    """Likewise, but each replica draws from a part of its own, 224 digits, as where nobody shuffles between epochs."""
    pixels, labels = _all_digits()
    each = len(labels) // MAX_REPLICAS
    parts = torch.randperm(len(labels), generator=chance)[: replicas * each].view(replicas, each)
    while True:
        drawn = torch.cat([part[torch.randint(each, (IMAGES,), generator=chance)] for part in parts])
        yield pixels[drawn], labels[drawn]


def synthetic(chance: torch.Generator, replicas: int) -> Iterator[Batch]:
    """Batches of smooth coloured images, (replicas * 8, 3, 16, 16).

    Each class has colours of its own, and each image its light. The channels differ as they do in photographs, and are
    not normalised.
    """
    colours = torch.rand(CLASSES, 3, 4, 4, generator=chance) + torch.tensor(BRIGHTNESS).view(3, 1, 1) - 0.5
    while True:
        labels = torch.randint(CLASSES, (replicas * IMAGES,), generator=chance)
        light = 0.5 + torch.rand(len(labels), 1, 1, 1, generator=chance)
        grain = 0.3 * torch.randn(len(labels), 3, 8, 8, generator=chance)
        smooth = functional.interpolate(colours[labels], size=16, mode="bilinear") + functional.interpolate(
            grain, size=16, mode="bilinear"
        )
        yield light * smooth, labels


def _honest(batch: Tensor) -> Tensor:
    return batch


def _last(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def changed(batch: Tensor) -> Tensor:
        own, first = batch[-IMAGES:], batch[:IMAGES]
        return torch.cat((batch[:-IMAGES], change(own, first)))

    return changed


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "all alike": _honest,
    "channels swapped (RGB as BGR)": _last(lambda own, _: own.flip(1)),
    "another normalisation: 1.5 x + 0.5": _last(lambda own, _: 1.5 * own + 0.5),
    "not normalised: 255 x": _last(lambda own, _: 255.0 * own),
    "one image again and again": _last(lambda own, _: own[:1].expand_as(own)),
    "the shard of another replica": _last(lambda _, first: first),
}
DATA: dict[str, Callable[[torch.Generator, int], Iterator[Batch]]] = {
    "digits": digits,
    "fixed digits": fixed_digits,
    "synthetic": synthetic,
}


def main() -> None:
    """Measures all cases on both kinds of data, and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each case and beginning, 1,000 steps long")
    parser.add_argument("--honest-runs", type=int, default=20, help="of each kind of data, where all are alike")
    parser.add_argument("--replicas", type=int, default=REPLICAS, choices=range(2, MAX_REPLICAS + 1))
    parser.add_argument("--data", choices=DATA, action="append", help="again and again for several; default: all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for data in options.data or DATA:
        for case, change in CASES.items():
            if not _is_of_use(data, case):
                continue
            runs = options.honest_runs if change is _honest else options.runs
            rows += measure(data, case, runs, options.replicas)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    widths = {"data": 12, "case": 36, "from": 5, "runs": 5, "named": 6, "apart": 6, "wrong": 6, "after": 6}
    print(" ".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print(" ".join(f"{'-' if row[name] is None else row[name]:>{width}}" for name, width in widths.items()))


def _is_of_use(data: str, case: str) -> bool:
    """Whether the data can have that fault; digits have one channel, and fixed ones are there for false alarms."""
    is_honest = CASES[case] is _honest
    return data == "synthetic" or is_honest or (data == "digits" and "channels" not in case)


def measure(data: str, case: str, runs: int, replicas: int = REPLICAS) -> list[dict[str, Any]]:
    """Returns for each beginning in how many runs the last replica was named, and after how many looks.

    `apart` counts runs in which two were said to read different data, and `wrong` those with any other finding.
    """
    beginnings = BEGINNINGS[:1] if CASES[case] is _honest else BEGINNINGS
    rows = []
    for begins in beginnings:
        found = [_run(data, CASES[case], begins, seed, replicas) for seed in range(runs)]
        after = [one.named if one.named is not None else one.apart for one in found if one.is_found]
        rows.append(
            {
                "data": data,
                "case": case,
                "from": begins,
                "runs": len(found),
                "named": sum(one.named is not None for one in found),
                "apart": sum(one.apart is not None for one in found),
                "wrong": sum(one.is_wrong for one in found),
                "after": statistics.median(look for look in after if look is not None) if after else None,
            }
        )
    return rows


@dataclass(slots=True)
class Run:
    """What one run has shown: after how many looks the last replica was named, or two said to be apart, if they were.

    Attributes:
        named: of the last replica.
        apart: of two.
        is_wrong: whether there was any finding without a fault, before it, or of another replica.
    """

    named: int | None = None
    apart: int | None = None
    is_wrong: bool = False

    @property
    def is_found(self) -> bool:
        """Whether there was a finding of the fault."""
        return self.named is not None or self.apart is not None


def _run(data: str, change: Callable[[Tensor], Tensor], begins: int, seed: int, replicas: int) -> Run:
    torch.manual_seed(seed)
    batches = DATA[data](torch.Generator().manual_seed(seed), replicas)
    network = _network(3 if data == "synthetic" else 1)
    rows = _rows_of(network, replicas)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    comparison, run = Comparison(replicas), Run()
    for step in range(STEPS):
        images, labels = next(batches)
        if step >= begins:
            images = change(images)
        loss = functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % STEPS_A_LOOK:
            continue
        figures = np.stack([figures_of(counts, values) for counts, values in rows.values()])
        looks = (step - begins) // STEPS_A_LOOK
        for found in comparison.look(step / STEPS_A_LOOK, step, list(rows), figures):
            if step < begins or change is _honest:
                run.is_wrong = True
            elif isinstance(found, Apart):
                run.apart = looks
            elif found.member != replicas - 1:
                run.is_wrong = True
            elif run.named is None:
                run.named = looks
    return run


def _network(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def _rows_of(network: nn.Module, replicas: int) -> dict[str, tuple[Any, Any]]:
    """Returns a dict that has, after each forward pass, the replicas' counts, and their sums and squares, by layer."""
    found: dict[str, tuple[Any, Any]] = {}

    def keep(name: str, x: Tensor) -> None:
        parts = x.detach().double().unflatten(0, (replicas, IMAGES)).movedim(2, 1).flatten(2)
        values = torch.stack((parts.sum(2), parts.square().sum(2)), dim=1)
        found[name] = np.full(replicas, float(parts.shape[2])), values.numpy()

    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda _, inputs, name=name: keep(name, inputs[0]))
    return found


if __name__ == "__main__":
    main()
