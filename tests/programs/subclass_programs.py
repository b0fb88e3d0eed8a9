"""What member processes do in `test_subclasses.py`: train with subclasses of torch's batch norm, eager or compiled."""

import torch
from torch import nn

import client
from programs.member_programs import Buffers
from support.subclasses import Activated, Functional, Helped

STEPS = 4
SIZES = (3, 1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 1), Functional(3), nn.Conv2d(3, 3, 1), Activated(3), nn.Conv2d(3, 2, 1), Helped(2)
    ).double()


def train(connection: client.Connection, backend: str) -> Buffers:
    """Weights and buffers after some steps on this member's shards; an empty `backend` does not compile."""
    torch.compiler.reset()
    model = client.convert_model(network())
    run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, factors = (whole.split(SIZES)[connection.rank] for whole in _batch(step))
        optimizer.zero_grad()
        (run(x) * factors).sum().mul(len(SIZES)).backward()
        client.average_gradients(model)
        optimizer.step()
    return _state(model)


def train_on_the_whole_batch() -> Buffers:
    """The same without anybody else."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, factors = _batch(step)
        optimizer.zero_grad()
        (model(x) * factors).sum().backward()
        optimizer.step()
    return _state(model)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SIZES), 2, 3, 2, generator=generator, dtype=torch.float64)
    return x, torch.randn(x.shape, generator=generator, dtype=torch.float64)


def _state(model: nn.Module) -> Buffers:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
