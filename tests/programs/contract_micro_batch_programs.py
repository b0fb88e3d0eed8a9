"""Micro-batches on the ranks of the contract's tests, in a pipeline of two stages, and the same with `nn.BatchNorm`.

Outputs and gradients equal those of each micro-batch over all ranks, running statistics those of the mini-batch.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import client
from programs.contract_training_programs import Job, perhaps

MINI_BATCHES = 2

# Samples of each rank, a row for each micro-batch; one rank has none in the third.
SHARES = ((1, 3), (2, 2), (4, 0), (1, 2))
CHUNKS = len(SHARES)

# Which micro-batch runs forward (F) or backward (B).
SCHEDULES = {
    "accumulation": "F0 B0 F1 B1 F2 B2 F3 B3",
    "GPipe": "F0 F1 F2 F3 B3 B2 B1 B0",
    "1F1B": "F0 F1 F2 B0 F3 B1 B2 B3",
}

# `use_reentrant` of a checkpoint around each stage; None for no checkpoint.
CHECKPOINTS = {"kept": None, "recomputed": False, "recomputed by a reentrant checkpoint": True}

Seen = dict[str, Tensor]


def stages() -> nn.Sequential:
    """The first batch norm normalises the input, the second one the output of the first stage."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 3, 3, bias=False), nn.SiLU())
    second = nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh())
    return nn.Sequential(first, second).double()


def micro_batch(mini_batch: int, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and the factors of the loss; each micro-batch has another mean, and each sample too."""
    samples = sum(SHARES[number])
    generator = torch.Generator().manual_seed(10 * mini_batch + number)
    x = torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64)
    factors = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x + 3 * number + torch.arange(samples).view(-1, 1, 1, 1), factors


def by_schedule(rank: Any, schedule: str, reentrant: bool | None, job: Job | None) -> Seen:
    """One rank's share of two mini-batches; the gradients of both ranks are averaged before each optimizer step."""
    with perhaps(job):
        model = client.convert_model(stages(), chunks=CHUNKS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: Seen = {}
        for mini_batch in range(MINI_BATCHES):
            pipeline = Pipeline(model, reentrant)
            for step in SCHEDULES[schedule].split():
                number = int(step[1:])
                x, factors = (whole.split(SHARES[number])[rank.rank] for whole in micro_batch(mini_batch, number))
                if step.startswith("F"):
                    seen[f"output {mini_batch}.{number}"] = pipeline.forward(number, x)
                else:
                    seen[f"input gradient {mini_batch}.{number}"] = pipeline.backward(number, factors)
            samples = client.average_gradients(model, sum(shares[rank.rank] for shares in SHARES))
            assert samples == sum(map(sum, SHARES))
            _step(model, optimizer, seen, mini_batch)
        return seen


def in_one_process() -> Seen:
    """Torch's layers, micro-batch by micro-batch, with the samples of all ranks."""
    model = stages()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: Seen = {}
    for mini_batch in range(MINI_BATCHES):
        before = copy.deepcopy(model)
        inputs: dict[str, list[Tensor]] = {name: [] for name, layer in model.named_modules() if _is_batch_norm(layer)}
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(lambda _, given, parts=parts: parts.append(given[0]))
            for name, parts in inputs.items()
        ]
        for number in range(CHUNKS):
            x, factors = micro_batch(mini_batch, number)
            y = model(x.requires_grad_())
            (y * factors).sum().backward()
            seen |= {f"output {mini_batch}.{number}": y.detach(), f"input gradient {mini_batch}.{number}": x.grad}
        for hook in hooks:
            hook.remove()
        for name, parts in inputs.items():
            _move_in_one_piece(model.get_submodule(name), before.get_submodule(name), torch.cat(parts))
        for parameter in model.parameters():
            parameter.grad /= sum(map(sum, SHARES))
        _step(model, optimizer, seen, mini_batch)
    return seen


class Pipeline:
    """Two stages in one process; tensors between them are detached from the graph, as between two processes."""

    def __init__(self, model: nn.Sequential, reentrant: bool | None) -> None:
        self._first, self._second = model
        self._reentrant = reentrant
        self._under_way: dict[int, tuple[Tensor, ...]] = {}

    def forward(self, number: int, x: Tensor) -> Tensor:
        sent = self._run(self._first, x.requires_grad_())
        received = sent.detach().requires_grad_()
        y = self._run(self._second, received)
        self._under_way[number] = x, sent, received, y
        return y.detach()

    def backward(self, number: int, factors: Tensor) -> Tensor:
        """Returns the gradient of the input."""
        x, sent, received, y = self._under_way.pop(number)
        (y * factors).sum().backward()
        sent.backward(received.grad)
        return x.grad

    def _run(self, stage: nn.Module, x: Tensor) -> Tensor:
        return stage(x) if self._reentrant is None else checkpoint(stage, x, use_reentrant=self._reentrant)


def _is_batch_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)


def _move_in_one_piece(layer: nn.Module, before: nn.Module, mini_batch: Tensor) -> None:
    before(mini_batch)
    for name, buffer in before.named_buffers():
        layer.get_buffer(name).copy_(buffer)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seen: Seen, mini_batch: int) -> None:
    seen |= {f"gradient {mini_batch} of {name}": value.grad.clone() for name, value in model.named_parameters()}
    seen |= {f"{name} after {mini_batch}": buffer.clone() for name, buffer in model.named_buffers()}
    optimizer.step()
    optimizer.zero_grad()
