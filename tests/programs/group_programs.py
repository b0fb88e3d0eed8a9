"""What member processes do in `test_layer_groups.py`: layers that synchronise with some of the members only."""

import os
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import client
from support import whole_batch
from support.whole_batch import Case, Result

SIZES = (3, 1, 2, 4)
CHANNELS = 5
EPS = 1e-5

# Which members share the statistics of each layer of `model`.
SHARED = {
    "pair": ((0, 1), (2, 3)),
    "crossed": ((0, 2), (1, 3)),
    "world": ((0, 1, 2, 3),),
    "host": ((0, 1, 2), (3,)),
    "alone": ((0,), (1,), (2,), (3,)),
}


def pair_case(pair: int) -> Case:
    return Case("2d", SIZES[2 * pair : 2 * pair + 2], seed=pair)


def as_member_of_a_pair(connection: client.Connection) -> Result:
    """Members 0 and 1 have one whole batch, 2 and 3 another, in layers of the same name."""
    pair, index = divmod(connection.rank, 2)
    case = pair_case(pair)
    layer = client.convert_model(
        nn.ModuleDict({"bn": case.layer(synchronised=False)}), group=client.Group(f"pair {pair}", 2)
    )["bn"]
    return whole_batch.run_shard(case, layer, index)


def model(member: int) -> nn.Module:
    """A layer for each way of sharing; member 3 is on another host."""
    torch.manual_seed(0)
    groups = {
        "pair": client.Group(f"pair {member // 2}", 2),
        "crossed": client.Group(f"crossed {member % 2}", 2),
        "world": None,
        "host": "local",
        "alone": client.Group(f"alone {member}", 1),
    }
    layers = {name: client.SynchronizedBatchNorm1d(CHANNELS, EPS, group=group) for name, group in groups.items()}
    for name, layer in layers.items():
        layer.layer_name = name
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return nn.Sequential(*(part for layer in layers.values() for part in (layer, nn.Tanh()))).double()


def whole_model() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Output shards, the inputs' gradient and the parameters' gradients of the same model in one process."""
    x, factors = _tensors()
    leaf = x.clone().requires_grad_()
    layers = list(model(0))[::2]
    shards = list(leaf.split(SIZES))
    for layer, shared in zip(layers, SHARED.values(), strict=True):
        normal: list[Any] = [None] * len(SIZES)
        for members in shared:
            joined = torch.cat([shards[member] for member in members])
            whole = F.batch_norm(joined, None, None, layer.weight, layer.bias, training=True, eps=EPS)
            for member, part in zip(members, whole.split([SIZES[member] for member in members]), strict=True):
                normal[member] = part.tanh()
        shards = normal
    (torch.cat(shards) * factors).sum().backward()
    parameters = [parameter.grad for layer in layers for parameter in (layer.weight, layer.bias)]
    return [shard.detach() for shard in shards], leaf.grad, parameters


def as_member_of_many_groups(connection: client.Connection, backend: str | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    member = connection.rank
    x, factors = (whole.split(SIZES)[member] for whole in _tensors())
    x = x.clone().requires_grad_()
    with _on_host(member):
        network = model(member)
        run = network
        if backend and member in {0, 3}:  # one of each host; the others are eager
            torch.compiler.reset()
            run = torch.compile(network, fullgraph=True, backend=backend)
        output = run(x)
        (output * factors).sum().backward()
    return output.detach(), x.grad, [parameter.grad for parameter in network.parameters()]


@contextmanager
def _on_host(member: int) -> Any:
    """Sets torchrun's variables for three members on the first node and one on the second."""
    variables = {"LOCAL_WORLD_SIZE": "3" if member < 3 else "1", "GROUP_RANK": str(member // 3)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (sum(SIZES), CHANNELS, 3)
    x, factors = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x * 2 + 1, factors


def train_in_a_pair_or_leave(connection: client.Connection, steps: int) -> int:
    """Members 0 and 1 train together; member 2 is in no group of theirs and leaves at once. Returns the rounds."""
    if connection.rank < 2:
        layer = client.SynchronizedBatchNorm1d(3, group=client.Group("two", 2))
        layer.layer_name = "bn"
        for _ in range(steps):
            x = torch.randn(4, 3, requires_grad=True)
            (layer(x) ** 2).sum().backward()
    return connection.rounds


def recalibrate_in_pairs(connection: client.Connection) -> tuple[Tensor, Tensor, int]:
    """Running mean and variance of a layer of this member's pair, and the number of batches."""
    member = connection.rank
    layer = client.SynchronizedBatchNorm1d(CHANNELS, group=client.Group(f"pair {member // 2}", 2)).double()
    layer.layer_name = "bn"
    batches = client.recalibrate(layer, [_tensors()[0].split(SIZES)[member]] * (member + 1))
    return layer.running_mean, layer.running_var, batches
