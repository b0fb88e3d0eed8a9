"""Training steps in replicas of one process, with layers whose rows stay on devices."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import client
from client.nn import call
from client.ops.exchange import Exchange
from client.ops.triton.exchange import TritonExchange
from client.transports.transport import Transport

REPLICAS = 3


class Layered(nn.Module):
    """A layer that each replica calls by `run`, within the context manager of `guard`."""

    def __init__(self, run, guard=nullcontext, **options):
        super().__init__()
        self.bn = client.SynchronizedBatchNorm1d(4, **options)
        self.bn.layer_name = "bn"
        self.run = run
        self.guard = guard

    def forward(self, x):
        with self.guard():
            return self.run(self.bn, x)


def plain(bn, x):
    return bn(x)


def masked(bn, x):
    return bn(x, x[:, 0] > -1)


def used_twice(bn, x):
    return bn(bn(x).tanh())


def checkpointed(bn, x):
    return checkpoint(bn, x, use_reentrant=False)


RUNS = [plain, masked, used_twice, checkpointed]
OPTIONS = {
    "usual": {},
    "float64": {"dtype": torch.float64},
    "cumulative average": {"momentum": None},
    "clamp": {"eps_mode": "clamp", "eps": 0.9},
    "micro-batches": {"chunks": 2},
    "without parameters": {"affine": False},
}


def training(run, options, guard=nullcontext, device="cpu", penalty=False):
    """Outputs, gradients and buffers of three steps; `guard` applies to the last two."""
    torch.manual_seed(0)
    model = Layered(run, **options)
    wrapped = client.DataParallelWithCallback(model.to(device), [device] * REPLICAS)
    found = {}
    for step in range(3):
        # Drawn on the CPU: each kind of device has a generator with other numbers.
        x = torch.randn(7, 4, 5, dtype=options.get("dtype")).to(device).requires_grad_()
        model.guard = guard if step else nullcontext
        with model.guard():
            output = wrapped(x)
            if penalty:
                (output,) = torch.autograd.grad((output**3).sum(), x, create_graph=True)
            (output * output.detach().cumsum(0)).sum().backward()
        found |= {f"output {step}": output.detach(), f"input {step}": x.grad}
    return found | dict(model.named_buffers()) | {name: each.grad for name, each in model.named_parameters()}


@contextmanager
def exchanges_noted() -> Iterator[list[type[Transport]]]:
    """Yields a list, to which each exchange on devices appends the type of its transport."""
    found: list[type[Transport]] = []

    class Noted(Exchange):
        def forward(self, local):
            if self.capacity:
                found.append(type(self.transport))
            super().forward(local)

    class NotedOfTriton(TritonExchange):
        def normalise(self, *given):
            found.append(type(self.transport))
            return super().normalise(*given)

    with mock.patch.object(call, "Exchange", Noted), mock.patch.object(call, "TritonExchange", NotedOfTriton):
        yield found
