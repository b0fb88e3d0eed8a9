"""What member processes do in `test_smart_ddp.py`, over gloo and on the CPU."""

import warnings

import torch
from torch import nn

import client
from programs import ddp_programs
from programs.ddp_programs import Training
from programs.member_programs import Buffers


def train(connection: client.Connection, store: str, training: Training) -> str:
    """The error that ends the training of a member's shard."""
    model = ddp_programs.network(training)
    optimizer = ddp_programs.optimizer_for(model)
    with ddp_programs.process_group(store, connection):
        parallel = ddp_programs.keep(client.smart_ddp(model))
        try:
            ddp_programs.train_shard(parallel, optimizer, training, connection.rank)
        except RuntimeError as error:
            return str(error)
    return "trained"


def train_in_micro_batches(connection: client.Connection, store: str, sizes: tuple[int, ...]) -> Buffers:
    """A mini-batch in two micro-batches, the first under `no_sync`, through a model converted with `chunks`."""
    torch.manual_seed(0)
    model = client.convert_model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), chunks=2)
    with ddp_programs.process_group(store, connection):
        parallel = ddp_programs.keep(client.smart_ddp(model, static_graph=False))
        first, second = (part.split(sizes)[connection.rank] for part in micro_batches(sizes))
        with parallel.no_sync():
            parallel(first).square().sum().backward()
        parallel(second).square().sum().backward()
    return {name: buffer.numpy() for name, buffer in model[0].named_buffers()}


def micro_batches(sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2 * sum(sizes), 3, generator=generator, dtype=torch.float64).add(3).chunk(2)


def wrap(connection: client.Connection, store: str) -> tuple[list[str], list[str]]:
    """What is refused, and what is warned of."""
    with ddp_programs.process_group(store, connection):
        refused = [
            _refusal(model) for model in (_model().requires_grad_(requires_grad=False), nn.Tanh(), _on_two_devices())
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp_programs.keep(client.smart_ddp(nn.Sequential(nn.Linear(2, 2), Special(2))))
    told = [f"{warning.filename.rpartition('/')[2]}: {warning.message}" for warning in caught]
    return refused, told


class Special(nn.BatchNorm1d):
    """A class of the user's own, which need not come to its `forward`."""

    def __call__(self, x):
        return x - x.mean(0)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def _on_two_devices() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta"))


def _refusal(model: nn.Module) -> str:
    try:
        client.smart_ddp(model)
    except ValueError as error:
        kinds = [type(layer).__name__ for layer in model.modules() if isinstance(layer, client.SynchronizedBatchNorm)]
        return f"{error} {kinds}"
    return "not refused"
