"""What member processes train under DistributedDataParallel, over gloo and on the CPU."""

import atexit
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import client
from programs.member_programs import Buffers
from support.sentences import error_of

STEPS = 3
SECONDS = 30.0

# A rank's results by name and step, and its final state.
Seen = dict[str, Tensor]

Batch = tuple[Tensor, Tensor]

# Freeing the last reference to a gloo group holds the interpreter's lock and waits for gloo's threads, one of which may
# wait for that lock: a deadlock. So references are kept, and the process exits without teardown, see below.
_kept: list[object] = []

T = TypeVar("T")


def keep(holder: T) -> T:
    _kept.append(holder)
    return holder


@dataclass(frozen=True)
class Mode:
    options: tuple[tuple[str, Any], ...] = ()  # of DistributedDataParallel, as pairs
    shares: tuple[int, ...] = (3, 3)  # samples of each rank in each micro-batch
    micro_batches: int = 1  # per step; all but the last run under `no_sync`
    branch: bool = False  # every other step runs a branch that the first step skips


class Network(nn.Module):
    """Smooth, and without a bias before a batch norm: such a bias has no effect; its gradient is rounding errors."""

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
    """Inputs and the factors of the loss; each sample has a different mean, so shares differ from the whole."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    factors = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return x + torch.arange(samples).view(-1, 1, 1, 1), factors / samples


def train_on_the_whole_batch(mode: Mode, steps: int = STEPS) -> tuple[Network, Seen]:
    """`nn.BatchNorm` in one process, with all samples of each micro-batch."""
    model = network(mode)
    return model, _train(model, model, mode, lambda number: batch(number, sum(mode.shares)), 1, steps)


def train_share(run: Any, model: nn.Module, mode: Mode, rank: int, steps: int = STEPS) -> Seen:
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
    # Gloo's threads may also abort an interpreter during its teardown (pytorch#190489), so the process skips it.
    atexit.register(os._exit, 0)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    keep(distributed.group.WORLD)
    try:
        yield
        # No rank destroys the group while another is in its last collective.
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _train(run: Any, model: nn.Module, mode: Mode, data: Callable[[int], Batch], ranks: int, steps: int) -> Seen:
    """Trains `model` through `run`, which averages gradients over `ranks` ranks."""
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
    """Whether a micro-batch runs under `no_sync`: not the last, and none in a static graph's first step."""
    is_last = part == mode.micro_batches - 1
    is_first_of_static = step == 0 and "static_graph" in dict(mode.options)
    return isinstance(run, DistributedDataParallel) and not is_last and not is_first_of_static


def _gradients(model: nn.Module, step: int) -> Seen:
    """Zeros for a parameter without a gradient: DDP gives it zeros, and a plain model None."""
    return {
        f"gradient {step} of {name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def train(connection: client.Connection, store: str) -> str:
    """The error of a training with a static graph in which later steps use a branch that the first step skips."""
    mode = Mode(branch=True)
    with process_group(store, connection):
        parallel = keep(client.smart_ddp(network(mode)))
        return error_of(train_share, parallel, parallel, mode, connection.rank)


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
    """The refusal of a model on two devices, its batch norm's class afterwards, and the warnings for another model."""
    scattered = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta"))
    with process_group(store, connection):
        refusal = error_of(client.smart_ddp, scattered)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            keep(client.smart_ddp(nn.Sequential(nn.Linear(2, 2), Special(2))))
    warned = [f"{warning.filename.rpartition('/')[2]}: {warning.message}" for warning in caught]
    return refusal, type(scattered[1]).__name__, warned


class Special(nn.BatchNorm1d):
    """A user's subclass that bypasses `forward`."""

    def __call__(self, x):
        return x - x.mean(0)


def end_without_teardown(main: Callable[[Path], None]) -> None:
    """Calls `main` with the folder on the command line, and exits: gloo may abort a teardown (pytorch#190489)."""
    code = 0
    try:
        main(Path(sys.argv[1]))
    except Exception:  # noqa: BLE001 - whatever it is, it is shown
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
