"""A small training that `test_lightning.py` runs twice: in one process, and as `lightning_program.py` in several."""

import torch
from torch import nn

MEMBERS = 2
BATCH = 3
STEPS = 5
EPOCHS = 2

State = dict[str, torch.Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.Tanh(),
        nn.InstanceNorm2d(4, affine=True),
        nn.Flatten(),
        nn.Linear(64, 5, bias=False),
        nn.BatchNorm1d(5, momentum=None),
    ).double()
    made[-1].bias.requires_grad = False
    return made


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    n = MEMBERS * BATCH * STEPS
    x = torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 5, generator=generator, dtype=torch.float64)


def loss(model: nn.Module, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return (model(x) * factors).sum() / len(x)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def train(model: nn.Module) -> State:
    """Trains on whole batches, as one `Trainer.fit` does on shards; returns the state."""
    steps = optimizer(model)
    for _ in range(EPOCHS):
        for x, factors in zip(*(whole.split(MEMBERS * BATCH) for whole in samples()), strict=True):
            steps.zero_grad()
            loss(model, x, factors).backward()
            steps.step()
    return state(model)


def state(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def names(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model if "Norm" in type(layer).__name__]
