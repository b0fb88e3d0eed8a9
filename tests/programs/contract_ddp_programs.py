"""What ranks of the contract's tests train under DistributedDataParallel, and the same on the whole batch.

Every number is compared in float64: outputs, the gradients of inputs and of weights in each step, and the state at the
end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import client
from programs.contract_training_programs import Job, perhaps
from programs.ddp_programs import keep

STEPS = 3
FEATURES = 5

# What a rank has seen: by name and step, and its state at the end.
Seen = dict[str, Tensor]

Batch = tuple[Tensor, Tensor]


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
    """A batch norm for images, one for features, and one that some steps do not use.

    No layer has a bias that the batch norm behind it cancels: its gradient would be rounding errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU())
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(16, FEATURES, bias=False), nn.BatchNorm1d(FEATURES))

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        x = self.images(x)
        return self.features(x + self.branch(x) if branch else x)


def network(mode: Mode) -> Network:
    torch.manual_seed(0)
    made = Network().double()
    if not mode.branch:
        made.branch = None
    return made


def batch(number: int, samples: int) -> Batch:
    """Inputs and the factors of the loss; each sample has a mean of its own, so that shares differ from the whole."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64)
    factors = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return x + torch.arange(samples).view(-1, 1, 1, 1), factors / samples


def on_the_whole_batch(mode: Mode) -> Seen:
    """`nn.BatchNorm` in one process, with all samples of each micro-batch."""
    model = network(mode)
    return _train(model, model, mode, lambda number: batch(number, sum(mode.shares)), 1)


def under_ddp(rank: Any, mode: Mode, job: Job | None) -> Seen:
    """One rank's share; a bucket for every few parameters has gradients reduced while our layers exchange."""
    with perhaps(job):
        model = client.convert_model(network(mode))
        parallel = keep(DistributedDataParallel(model, bucket_cap_mb=0.0005, **dict(mode.options)))
        return _train(parallel, model, mode, _share(rank.rank, mode), len(mode.shares))


def under_smart_ddp(rank: Any, mode: Mode, job: Job | None, spelling: str) -> Seen:
    """The same in one call."""
    with perhaps(job):
        model = network(mode)
        parallel = keep(getattr(client, spelling)(model, **dict(mode.options)))
        return _train(parallel, parallel.module, mode, _share(rank.rank, mode), len(mode.shares))


def _share(rank: int, mode: Mode) -> Callable[[int], Batch]:
    def share(number: int) -> Batch:
        x, factors = (whole.split(mode.shares)[rank] for whole in batch(number, sum(mode.shares)))
        return x, factors

    return share


def _train(run: Any, model: nn.Module, mode: Mode, data: Callable[[int], Batch], ranks: int) -> Seen:
    """Trains `model` through `run`, which averages over so many ranks."""
    seen: Seen = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
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
    return seen | state(model)


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


def state(model: nn.Module) -> Seen:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# Uneven inputs.

SHARES = (2, 3, 1)


def with_uneven_inputs(rank: Any, batches: Sequence[int], job: Job) -> Seen:
    """Two passes over as many batches as this rank has, under torch's `Join` and ours; the state at the end."""
    mine = rank.rank
    with job.connect():
        model = client.convert_model(network(Mode()))
        parallel = keep(DistributedDataParallel(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for first in (0, 10):
            with Join([parallel]), client.join(parallel):
                for number in range(first, first + batches[mine]):
                    _, parts = _present(number, number - first, batches)
                    x, factors = parts[mine]
                    optimizer.zero_grad()
                    ((parallel(x, branch=False) * factors).sum() * len(batches)).backward()
                    optimizer.step()
        return state(model)


def with_uneven_inputs_together(batches: Sequence[int]) -> Seen:
    """One process, with the samples of all ranks that have a batch left."""
    model = network(Mode())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in (0, 10):
        for number in range(first, first + max(batches)):
            (x, factors), _ = _present(number, number - first, batches)
            optimizer.zero_grad()
            (model(x, branch=False) * factors).sum().backward()
            optimizer.step()
    return state(model)


def _present(number: int, of_pass: int, batches: Sequence[int]) -> tuple[Batch, dict[int, Batch]]:
    """A batch of the ranks that have one left in this pass, and the share of each."""
    present = [rank for rank, count in enumerate(batches) if of_pass < count]
    sizes = [SHARES[rank] for rank in present]
    x, factors = batch(number, sum(sizes))
    return (x, factors), dict(zip(present, zip(x.split(sizes), factors.split(sizes), strict=True), strict=True))


# What smart_ddp makes, refuses and broadcasts.


def made_by_smart_ddp(_rank: Any) -> dict[str, Any]:
    """The layers' classes and the wrapper's arguments, and what models without parameters to learn are told."""
    made = {}
    for options in ({}, {"static_graph": False}, {"convert": False}):
        parallel = keep(client.smart_ddp(_small(), **options))
        kind = type(parallel.module[1]).__name__
        made[str(options)] = (kind, parallel.static_graph, parallel.find_unused_parameters)
    refused = []
    for model in (_small().requires_grad_(requires_grad=False), nn.Tanh()):
        try:
            client.smart_ddp(model)
        except ValueError as error:
            refused.append(str(error))
    return {"made": made, "refused": refused}


def means_after_an_evaluation(rank: Any, way: str, options: dict[str, Any], job: Job) -> list[float]:
    """The running mean, which each rank has set to a number of its own, after an evaluation through a wrapper.

    Args:
        rank: of this process.
        way: "converted by smart_ddp" and "left by smart_ddp": before any training; "trained under DDP": after a step.
        options: of `smart_ddp`.
        job: of both ranks.
    """
    with job.connect():
        if way == "trained under DDP":
            parallel = keep(DistributedDataParallel(client.convert_model(_small())))
            parallel(torch.randn(3, 2)).sum().backward()
        else:
            parallel = keep(client.smart_ddp(_small(), convert=way == "converted by smart_ddp", **options))
        parallel.eval()
        parallel.module[1].running_mean.fill_(10.0 + rank.rank)
        parallel(torch.randn(3, 2))
        return parallel.module[1].running_mean.tolist()


def _small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def broken(results: Sequence[Seen]) -> Iterator[str]:
    """The names of buffers and weights that are not the same to the bit on all ranks."""
    for name in network(Mode(branch=True)).state_dict():
        if name in results[0] and any(not torch.equal(results[0][name], one[name]) for one in results[1:]):
            yield name
