"""What member processes do in `test_smart_ddp.py`, over gloo and on the CPU."""

import warnings

import torch
from torch import nn

import client
from programs.ddp_programs import Mode, keep, network, process_group, train_share
from programs.member_programs import Buffers


def train(connection: client.Connection, store: str) -> str:
    """The error that ends the training of a member's share, in a branch that the first step does not use."""
    mode = Mode(branch=True)
    with process_group(store, connection):
        parallel = keep(client.smart_ddp(network(mode)))
        try:
            train_share(parallel, parallel, mode, connection.rank)
        except RuntimeError as error:
            return str(error)
    return "trained"


def train_in_micro_batches(connection: client.Connection, store: str, sizes: tuple[int, ...]) -> Buffers:
    """A mini-batch in two micro-batches, the first under `no_sync`, through a model converted with `chunks`."""
    torch.manual_seed(0)
    model = client.convert_model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), chunks=2)
    with process_group(store, connection):
        parallel = keep(client.smart_ddp(model, static_graph=False))
        first, second = (part.split(sizes)[connection.rank] for part in micro_batches(sizes))
        with parallel.no_sync():
            parallel(first).square().sum().backward()
        parallel(second).square().sum().backward()
    return {name: buffer.numpy() for name, buffer in model[0].named_buffers()}


def micro_batches(sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2 * sum(sizes), 3, generator=generator, dtype=torch.float64).add(3).chunk(2)


def wrap(connection: client.Connection, store: str) -> tuple[str, str, list[str]]:
    """Of a model on two devices: the refusal, and the class of its batch norm then; of another: the warnings."""
    scattered = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta"))
    refusal = ""
    with process_group(store, connection):
        try:
            client.smart_ddp(scattered)
        except ValueError as error:
            refusal = str(error)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            keep(client.smart_ddp(nn.Sequential(nn.Linear(2, 2), Special(2))))
    warned = [f"{warning.filename.rpartition('/')[2]}: {warning.message}" for warning in caught]
    return refusal, type(scattered[1]).__name__, warned


class Special(nn.BatchNorm1d):
    """A class of the user's own, which need not come to its `forward`."""

    def __call__(self, x):
        return x - x.mean(0)
