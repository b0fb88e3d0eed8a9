"""A training that each framework runs in two processes, and `test_frameworks.py` in one process on the whole batch."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2
BATCH = 3
STEPS = 5
LEARNING_RATE = 0.05

State = dict[str, torch.Tensor]


def network(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """Returns a network in float64, so that differences are not rounding errors."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), norm(4), nn.Tanh(), nn.Conv2d(4, 3, 2), norm(3), nn.Flatten(), nn.Linear(27, 2)
    ).double()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    n = RANKS * BATCH * STEPS
    x = torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 2, generator=generator, dtype=torch.float64)


def dataset() -> TensorDataset:
    return TensorDataset(*samples())


def loader() -> DataLoader:
    """This rank's part of each whole batch, in order."""
    data = dataset()
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))


def loss(output: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return (output * factors).sum() / len(output)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def train_on_the_whole_batch() -> State:
    model = network()
    steps = optimizer(model)
    for x, factors in zip(*(whole.split(RANKS * BATCH) for whole in samples()), strict=True):
        steps.zero_grad()
        loss(model(x), factors).backward()
        steps.step()
    return dict(model.state_dict())


def save(model: nn.Module, folder: Path | str) -> None:
    inner = next(part for part in model.modules() if isinstance(part, nn.Sequential))
    state = {name: value.detach().clone() for name, value in inner.state_dict().items()}
    torch.save(state, Path(folder) / f"{distributed.get_rank()}.pt")
