"""What member processes train under DistributedDataParallel, over gloo and on the CPU."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import client
from programs.member_programs import Buffers, state

STEPS = 20
SECONDS = 30.0

# Whoever frees the last reference to a gloo group holds the interpreter's lock and waits for gloo's threads, one of
# which may wait for that lock, for ever. So nobody frees any; the process ends without tearing down, see below.
_kept: list[object] = []

T = TypeVar("T")


def keep(holder: T) -> T:
    """Returns what holds a gloo group, which will never be freed."""
    _kept.append(holder)
    return holder


@dataclass(frozen=True)
class Training:
    """How 20 steps are trained.

    Attributes:
        sizes: samples per member.
        branch: the model has a branch that some steps do not use.
    """

    sizes: tuple[int, ...] = (3, 3)
    branch: bool = False


class Network(nn.Module):
    """Smooth everywhere: where a ReLU bends, a rounding error could become a jump."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=False), nn.BatchNorm1d(5))

    def forward(self, x: torch.Tensor, *, branch: bool) -> torch.Tensor:
        x = self.stem(x)
        x = self.body(x) + self.branch(x) if branch else self.body(x)
        return self.head(x)


def network(training: Training) -> Network:
    torch.manual_seed(0)
    made = Network().double()
    if not training.branch:
        made.branch = None
    return made


def train_on_the_whole_batch(training: Training) -> Buffers:
    model = network(training)
    optimizer = optimizer_for(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, factors = _batch(training, step)
        _loss(model(x, branch=_uses_branch(training, step)), factors, training).backward()
        optimizer.step()
    return state(model)


def train_shard(
    parallel: DistributedDataParallel, optimizer: torch.optim.Optimizer, training: Training, rank: int
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        x, factors = (whole.split(training.sizes)[rank] for whole in _batch(training, step))
        output = parallel(x, branch=_uses_branch(training, step))
        (_loss(output, factors, training) * len(training.sizes)).backward()
        optimizer.step()


@contextmanager
def process_group(store: str, connection: client.Connection) -> Iterator[None]:
    with process_group_of(store, connection.member.rank, connection.member.world_size):
        yield


@contextmanager
def process_group_of(store: str, rank: int, size: int) -> Iterator[None]:
    # Gloo's threads may also abort an interpreter that is being torn down (pytorch#190489). So this one's is not.
    atexit.register(os._exit, 0)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )
    keep(distributed.group.WORLD)
    try:
        yield
        # Nobody tears the group down while another is still in its last exchange.
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _batch(training: Training, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    n = sum(training.sizes)
    x = torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 5, generator=generator, dtype=torch.float64)


def _uses_branch(training: Training, step: int) -> bool:
    """The first step does not, so that its layers come as news later."""
    return training.branch and step % 3 > 0


def _loss(output: torch.Tensor, factors: torch.Tensor, training: Training) -> torch.Tensor:
    """This shard's part of the mean over the whole batch."""
    return (output * factors).sum() / sum(training.sizes)
