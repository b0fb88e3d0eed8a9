"""Programs of the recalibration tests, for this process and for members."""

from typing import Any

import numpy as np
import torch
from torch import nn

import client
from programs.member_programs import small_model

Buffers = dict[str, np.ndarray]
Sizes = list[list[int]]


def model() -> nn.Module:
    """Two synchronised layers, one behind the other, in float64."""
    return client.convert_model(small_model())


def batches(sizes: Sizes) -> list[list[torch.Tensor]]:
    """Every member's batches, of the given sizes; each batch comes from another distribution."""
    generator = torch.Generator().manual_seed(1)
    return [[_batch(size, generator) for size in of_member] for of_member in sizes]


def _batch(size: int, generator: torch.Generator) -> torch.Tensor:
    shift = torch.randn(1, generator=generator, dtype=torch.float64)
    return torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64) * (1 + shift.abs()) + 3 * shift


def statistics(module: nn.Module) -> Buffers:
    return {name: buffer.clone().numpy() for name, buffer in module.named_buffers()}


def recalibrate_shard(connection: client.Connection, sizes: Sizes) -> tuple[Buffers, int, int]:
    """Returns the buffers, the number of batches over all members, and how many rounds it took."""
    network = model()
    rounds = connection.rounds
    total = client.recalibrate(network, batches(sizes)[connection.rank])
    return statistics(network), total, connection.rounds - rounds


def failure(network: nn.Module, loader: list[Any]) -> tuple[str, bool]:
    before = statistics(network)
    try:
        client.recalibrate(network, loader)
    except Exception as error:  # noqa: BLE001 - it is the result
        after = statistics(network)
        return f"{type(error).__name__}: {error}", all((after[name] == before[name]).all() for name in before)
    return "nothing was raised", False


def recalibrate_nothing(_: client.Connection) -> tuple[str, bool]:
    return failure(model(), [])


def recalibrate_nan_of_member_0(connection: client.Connection) -> tuple[str, bool]:
    loader = batches([[3], [2]])[connection.rank]
    if connection.rank == 0:
        loader[0][1, 0, 2, 3] = float("nan")
    return failure(model(), loader)


def recalibrate_other_layers(connection: client.Connection) -> tuple[str, bool]:
    """The members have frozen different layers of equal size."""
    network = client.convert_model(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    network[connection.rank].eval()
    return failure(network, [torch.eye(3)])


def recalibrate_where_a_layer_keeps_nothing(connection: client.Connection) -> int:
    """Returns the rounds it took; the members have different numbers of batches."""
    network = client.convert_model(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)))
    rounds = connection.rounds
    client.recalibrate(network, [torch.eye(3)] * (2 + connection.rank))
    return connection.rounds - rounds
