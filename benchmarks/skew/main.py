"""Skew: how soon a replica whose data differ is named, and how often one whose data do not.

A small network trains on the whole batch of eight replicas, which is what synchronised batch norm makes of it. At each
look, one in ten steps as once a second in a training of 0.1 s a step, the rows of each replica are taken from what
comes into its batch norms, and go as figures to `server.insight`. No process, no socket.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from server.insight.comparison import Comparison
from statsd_bn.skew import figures_of

REPLICAS, IMAGES = 8, 8
STEPS, STEPS_A_LOOK = 1000, 10
CLASSES = 10

# Mean brightness of red, green and blue in photographs, as ImageNet's recipes have it.
BRIGHTNESS = (0.485, 0.456, 0.406)

# From which step on the last replica's data differ: once half from the beginning, once later.
BEGINNINGS = (0, 500)

Batch = tuple[Tensor, Tensor]


def digits(chance: torch.Generator) -> Iterator[Batch]:
    """Batches of handwritten digits, (64, 1, 8, 8), drawn at random."""
    pixels, labels = _all_digits()
    while True:
        drawn = torch.randint(len(labels), (REPLICAS * IMAGES,), generator=chance)
        yield pixels[drawn], labels[drawn]


def _all_digits() -> Batch:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def fixed_digits(chance: torch.Generator) -> Iterator[Batch]:
    """Likewise, but each replica draws from a part of its own, 224 digits, as where nobody shuffles between epochs."""
    pixels, labels = _all_digits()
    each = len(labels) // REPLICAS
    parts = torch.randperm(len(labels), generator=chance)[: REPLICAS * each].view(REPLICAS, each)
    while True:
        drawn = torch.cat([part[torch.randint(each, (IMAGES,), generator=chance)] for part in parts])
        yield pixels[drawn], labels[drawn]


def synthetic(chance: torch.Generator) -> Iterator[Batch]:
    """Batches of smooth coloured images, (64, 3, 16, 16): each class has colours of its own, each image its light.

    The channels differ as they do in photographs, and are not normalised.
    """
    colours = torch.rand(CLASSES, 3, 4, 4, generator=chance) + torch.tensor(BRIGHTNESS).view(3, 1, 1) - 0.5
    while True:
        labels = torch.randint(CLASSES, (REPLICAS * IMAGES,), generator=chance)
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
DATA: dict[str, Callable[[torch.Generator], Iterator[Batch]]] = {
    "digits": digits,
    "fixed digits": fixed_digits,
    "synthetic": synthetic,
}


def main() -> None:
    """Measures all cases on both kinds of data, and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each case and beginning, 1,000 steps long")
    parser.add_argument("--honest-runs", type=int, default=20, help="of each kind of data, where all are alike")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for data in DATA:
        for case, change in CASES.items():
            if not _is_of_use(data, case):
                continue
            runs = options.honest_runs if change is _honest else options.runs
            rows.append(measure(data, case, runs))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'data':>12} {'case':>36} {'runs':>5} {'named':>6} {'another':>8} {'after looks':>12}")
    for row in rows:
        after = "-" if row["after"] is None else f"{row['after']:.0f}"
        found = f"{row['runs']:>5} {row['named']:>6.0%} {row['others']:>8.1%} {after:>12}"
        print(f"{row['data']:>12} {row['case']:>36} {found}")


def _is_of_use(data: str, case: str) -> bool:
    """Whether the data can have that fault; digits have one channel, and fixed ones are there for false alarms."""
    is_honest = CASES[case] is _honest
    return data == "synthetic" or is_honest or (data == "digits" and "channels" not in case)


def measure(data: str, case: str, runs: int) -> dict[str, Any]:
    """Returns in how many runs the last replica was named, and another, and after how many looks."""
    beginnings = BEGINNINGS[:1] if CASES[case] is _honest else BEGINNINGS
    found = [_run(data, CASES[case], begins, seed) for begins in beginnings for seed in range(runs)]
    after = [looks for looks, _ in found if looks is not None]
    return {
        "data": data,
        "case": case,
        "runs": len(found),
        "named": len(after) / len(found),
        "others": sum(is_wrong for _, is_wrong in found) / len(found),
        "after": statistics.median(after) if after else None,
    }


def _run(data: str, change: Callable[[Tensor], Tensor], begins: int, seed: int) -> tuple[int | None, bool]:
    """Returns after how many looks the last replica was named, and whether another was."""
    torch.manual_seed(seed)
    batches = DATA[data](torch.Generator().manual_seed(seed))
    network = _network(3 if data == "synthetic" else 1)
    rows = _rows_of(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    comparison, named, is_wrong = Comparison(REPLICAS), None, False
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
        differing, copies = comparison.look(step / STEPS_A_LOOK, step, list(rows), figures)
        for found in (*differing, *copies):
            is_due = found.member == REPLICAS - 1 and step >= begins and change is not _honest
            named = (step - begins) // STEPS_A_LOOK if is_due and named is None else named
            is_wrong = is_wrong or not is_due
    return named, is_wrong


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


def _rows_of(network: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns a dict that has, after each forward pass, the replicas' counts, and their sums and squares, by layer."""
    found: dict[str, tuple[Any, Any]] = {}

    def keep(name: str, x: Tensor) -> None:
        parts = x.detach().double().unflatten(0, (REPLICAS, IMAGES)).movedim(2, 1).flatten(2)
        values = torch.stack((parts.sum(2), parts.square().sum(2)), dim=1)
        found[name] = np.full(REPLICAS, float(parts.shape[2])), values.numpy()

    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda _, inputs, name=name: keep(name, inputs[0]))
    return found


if __name__ == "__main__":
    main()
