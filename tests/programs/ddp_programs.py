"""What member processes train under DistributedDataParallel, over gloo and on the CPU."""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import client

STEPS = 3
SECONDS = 30.0

# What a rank has seen: by name and step, and its state at the end.
Seen = dict[str, Tensor]

Batch = tuple[Tensor, Tensor]

# Whoever frees the last reference to a gloo group holds the interpreter's lock and waits for gloo's threads, one of
# which may wait for that lock, for ever. So nobody frees any; the process ends without tearing down, see below.
_kept: list[object] = []

T = TypeVar("T")


def keep(holder: T) -> T:
    """Returns what holds a gloo group, which will never be freed."""
    _kept.append(holder)
    return holder


@dataclass(frozen=True)
class Mode:
    """How a model is trained.

    Attributes:
        options: of DistributedDataParallel, as pairs.
        shares: samples of each rank in each micro-batch.
        micro_batches: per step; all but the last run under `no_sync`.
        branch: every other step uses a branch, whose layers the first step leaves out.
    """

    options: tuple[tuple[str, Any], ...] = ()
    shares: tuple[int, ...] = (3, 3)
    micro_batches: int = 1
    branch: bool = False


class Network(nn.Module):
    """Smooth everywhere: where a ReLU bends, a rounding error could become a jump.

    No layer has a bias that the batch norm behind it cancels: its gradient would be rounding errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=False), nn.BatchNorm1d(5))

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        x = self.stem(x)
        x = self.body(x) + self.branch(x) if branch else self.body(x)
        return self.head(x)


def network(mode: Mode) -> Network:
    torch.manual_seed(0)
    made = Network().double()
    if not mode.branch:
        made.branch = None
    return made


def batch(number: int, samples: int) -> Batch:
    """Inputs and the factors of the loss; each sample has a mean of its own, so that shares differ from the whole."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    factors = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return x + torch.arange(samples).view(-1, 1, 1, 1), factors / samples


def train_on_the_whole_batch(mode: Mode, steps: int = STEPS) -> tuple[Network, Seen]:
    """`nn.BatchNorm` in one process, with all samples of each micro-batch."""
    model = network(mode)
    return model, _train(model, model, mode, lambda number: batch(number, sum(mode.shares)), 1, steps)


def train_share(run: Any, model: nn.Module, mode: Mode, rank: int, steps: int = STEPS) -> Seen:
    """One rank's share, through `run`."""

    def share(number: int) -> Batch:
        x, factors = (whole.split(mode.shares)[rank] for whole in batch(number, sum(mode.shares)))
        return x, factors

    return _train(run, model, mode, share, len(mode.shares), steps)


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


def _train(run: Any, model: nn.Module, mode: Mode, data: Callable[[int], Batch], ranks: int, steps: int) -> Seen:
    """Trains `model` through `run`, which averages over so many ranks."""
    seen: Seen = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(mode.micro_batches):
            number = step * mode.micro_batches + part
            x, factors = data(number)
            with run.no_sync() if _accumulates(run, step, part, mode) else nullcontext():
                y = run(x.requires_grad_(), branch=mode.branch and step % 2 == 1)
                ((y * factors).sum() * ranks).backward()
            seen |= {f"output {number}": y.detach(), f"input gradient {number}": x.grad / ranks}
        seen |= _gradients(model, step)
        optimizer.step()
    return seen


def _accumulates(run: Any, step: int, part: int, mode: Mode) -> bool:
    """The last micro-batch never does; nor do those of the first step where the graph is static, as torch demands."""
    is_last = part == mode.micro_batches - 1
    is_first_of_static = step == 0 and "static_graph" in dict(mode.options)
    return isinstance(run, DistributedDataParallel) and not is_last and not is_first_of_static


def _gradients(model: nn.Module, step: int) -> Seen:
    """Nothing where a parameter has none: DDP makes it zero, and a plain model leaves it out."""
    return {
        f"gradient {step} of {name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
