"""Training of the contract's ranks under DistributedDataParallel, and on the whole batch, in float64."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import client
from programs.contract_training_programs import Job, perhaps
from programs.ddp_programs import Batch, Mode, Seen, batch, keep, network, train_on_the_whole_batch, train_share


def on_the_whole_batch(mode: Mode) -> Seen:
    model, seen = train_on_the_whole_batch(mode)
    return seen | state(model)


def under_ddp(rank: Any, mode: Mode, job: Job | None) -> Seen:
    """One rank's share. The buckets are small, so DDP reduces gradients while our layers exchange."""
    with perhaps(job):
        model = client.convert_model(network(mode))
        parallel = keep(DistributedDataParallel(model, bucket_cap_mb=0.0005, **dict(mode.options)))
        return train_share(parallel, model, mode, rank.rank) | state(model)


def under_smart_ddp(rank: Any, mode: Mode, job: Job | None, spelling: str) -> Seen:
    with perhaps(job):
        parallel = keep(getattr(client, spelling)(network(mode), **dict(mode.options)))
        return train_share(parallel, parallel.module, mode, rank.rank) | state(parallel.module)


def state(model: nn.Module) -> Seen:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# Uneven inputs.

SHARES = (2, 3, 1)


def with_uneven_inputs(rank: Any, batches: Sequence[int], job: Job) -> Seen:
    """The state after two passes over this rank's batches, under torch's `Join` and `client.join`."""
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
    """Layer classes and wrapper arguments, and the errors for models without trainable parameters."""
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
    """The running mean after an evaluation through a wrapper; before it, each rank sets its own value."""
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
