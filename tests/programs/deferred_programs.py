"""What member processes do in `test_deferred.py`: micro-batches of one mini-batch, split over the members."""

import copy

import torch
from torch import Tensor, nn

import client

Sizes = tuple[tuple[int, ...], ...]
Numbers = dict[str, object]


def network() -> nn.Sequential:
    """One kind of layer for (N, C, H, W) and one for (N, C) input."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)
    ).double()


def batch(samples: int, seed: int = 0) -> Tensor:
    """Shape (N, 1, 6, 6); each sample has another mean, so that micro-batches differ from the mini-batch."""
    x = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x + torch.arange(samples).view(-1, 1, 1, 1)


def own(member: int, sizes: Sizes, seed: int = 0) -> list[Tensor]:
    """A member's shares of the micro-batches; `sizes` has a row per micro-batch, an entry per member."""
    micro_batches = batch(sum(map(sum, sizes)), seed).split([sum(row) for row in sizes])
    return [part.split(row)[member] for part, row in zip(micro_batches, sizes, strict=True)]


def buffers(model: nn.Module) -> Numbers:
    return {name: buffer.numpy() for name, buffer in model.named_buffers()}


def share(connection: client.Connection, sizes: Sizes, chunks: int) -> list[Numbers]:
    """A single layer's buffers after each micro-batch of two mini-batches, and after their commits."""
    layer = client.convert_model(nn.BatchNorm2d(1).double(), chunks=chunks)
    seen = []
    for mini_batch in range(2):
        for x in own(connection.rank, sizes, seed=mini_batch):
            layer(x)
            seen.append(copy.deepcopy(buffers(layer)))
        client.commit_running_statistics(layer)
        seen.append(copy.deepcopy(buffers(layer)))
    return seen


def compiled(connection: client.Connection, sizes: Sizes, momentum: float | None) -> list[Numbers]:
    """Two mini-batches through a compiled model, and through an eager one."""
    torch.compiler.reset()
    found = []
    for is_compiled in (True, False):
        model = client.convert_model(network(), chunks=len(sizes))
        for layer in (model[1], model[5]):
            layer.momentum = momentum
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
        for mini_batch in range(2):
            for x in own(connection.rank, sizes, seed=mini_batch):
                run(x).square().sum().backward()
        found.append(buffers(model))
    return found
