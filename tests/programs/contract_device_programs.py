"""Computations of the contract's ranks on a device without float64, and the same on the whole batch on the host."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import client
from programs.contract_training_programs import Job, perhaps
from support.device_without_float64 import device_without_float64

STEPS = 3
CHANNELS = 3
SHARES = (2, 4)

Seen = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    shares: tuple[int, ...] = SHARES  # samples of each rank
    dtype: torch.dtype = torch.float32  # of input and parameters
    masked: bool = False  # some positions are masked
    twice: bool = False  # with a second derivative
    momentum: float | None = 0.1  # of the running statistics


def layer(case: Case) -> nn.BatchNorm1d:
    torch.manual_seed(0)
    made = nn.BatchNorm1d(CHANNELS, momentum=case.momentum)
    nn.init.uniform_(made.weight, 0.5, 1.5)
    nn.init.normal_(made.bias)
    return made.to(case.dtype)


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Input, factors of the loss, and a mask that leaves out some positions of each sample."""
    samples = sum(case.shares)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, CHANNELS, 5, generator=generator) * 2 + torch.arange(samples).view(-1, 1, 1)
    factors = torch.randn(samples, CHANNELS, 5, generator=generator)
    mask = torch.arange(5) < torch.arange(samples).unsqueeze(1) % 4 + 2
    return x.to(case.dtype), factors.to(case.dtype), mask


def one_call(rank: Any, case: Case, job: Job | None) -> Seen:
    """One rank's share on the device; the results are brought to the host."""
    with perhaps(job), device_without_float64() as device:
        model = client.convert_model(layer(case)).to(device)
        x, factors, mask = (whole.split(case.shares)[rank.rank].to(device) for whole in tensors(case))
        if case.masked:
            factors = factors * mask.unsqueeze(1)
        seen = _call(model, x, factors, twice=case.twice, **({"mask": mask} if case.masked else {}))
        assert {value.device for value in seen.values()} == {device}
        return {name: value.cpu() for name, value in seen.items()}


def on_the_whole_batch(case: Case) -> Seen:
    x, factors, mask = tensors(case)
    if case.masked:
        x, factors = (whole.movedim(1, -1)[mask].unsqueeze(2) for whole in (x, factors))
    return _call(layer(case).double(), x.double(), factors.double(), twice=case.twice)


def _call(model: nn.Module, x: Tensor, factors: Tensor, *, twice: bool, **mask: Tensor) -> Seen:
    """Output, gradients and buffers; `twice`: the gradients of a penalty on the input's gradient."""
    x = x.detach().clone().requires_grad_()
    y = model(x, **mask)
    if twice:
        (gradient,) = torch.autograd.grad((y.tanh() * factors).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    else:
        (y * factors).sum().backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"output": y.detach(), "input gradient": x.grad, **gradients, **dict(model.named_buffers())}


def network() -> nn.Sequential:
    """The second batch norm averages cumulatively, which divides by a number of batches that is on the device."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten()
    return nn.Sequential(*first, nn.Linear(16, 5, bias=False), nn.BatchNorm1d(5, momentum=None))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SHARES), 1, 4, 4, generator=generator)
    return x, torch.randn(sum(SHARES), 5, generator=generator)


def train(rank: Any, job: Job | None) -> Seen:
    """The state after some steps on the device, with gradients averaged over the ranks."""
    with perhaps(job), device_without_float64() as device:
        model = client.convert_model(network()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            x, factors = (whole.split(SHARES)[rank.rank].to(device) for whole in batch(step))
            optimizer.zero_grad()
            (model(x) * factors).sum().backward()
            client.average_gradients(model, len(x))
            optimizer.step()
        return {name: value.cpu() for name, value in model.state_dict().items()}


def train_on_the_whole_batch() -> Seen:
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, factors = batch(step)
        optimizer.zero_grad()
        ((model(x.double()) * factors.double()).sum() / len(x)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def measure(rank: Any, job: Job | None) -> tuple[Seen, Seen, list[Tensor]]:
    """The statistics after a mini-batch of two micro-batches, those after `recalibrate`, and a synchronised value."""
    case = Case()
    with perhaps(job), device_without_float64() as device:
        model = client.convert_model(layer(case), chunks=2).to(device)
        halves = [half.split((1, 2)) for half in tensors(case)[0].chunk(2)]
        own = [half[rank.rank].to(device) for half in halves]
        for part in own:
            model(part)
        moved = {name: value.cpu().clone() for name, value in model.named_buffers()}
        client.recalibrate(model, own)
        measured = {name: value.cpu() for name, value in model.named_buffers()}
        value = client.DDPHandler(None).mp_sync(torch.full((1 + rank.rank,), float(rank.rank)).to(device))
        assert value.device == device
        return moved, measured, value.cpu().tolist()
