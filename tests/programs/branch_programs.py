"""Compiled networks with branches: their training as members of a job, and their order of rounds without a job."""

from collections.abc import Callable
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

import client
from client.nn import batchnorm, custom_op
from client.transports.transport import LocalPipe
from support import branch_networks
from support.branch_networks import Network, Results

Round = tuple[str, int, str]


def _run(network: Network, compiled: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if network.is_checkpointed:
        return checkpoint(compiled, x, use_reentrant=False)
    return compiled(x)


def train(connection: client.Connection, seed: int, ranks: int, backend: str) -> Results:
    """Trains a compiled network on one rank's share of each batch; returns the rank's results."""
    torch.compiler.reset()
    network = Network(seed, ranks)
    model = client.convert_model(network.model())
    compiled = torch.compile(model, fullgraph=True, dynamic=network.dynamic, backend=backend)
    found: Results = {}
    for step in range(len(network.batches)):
        x = network.inputs(step)[connection.rank].requires_grad_()
        output = _run(network, compiled, x)
        branch_networks.loss(output).backward()
        prefix = f"{step}/{connection.rank}"
        found |= {f"{prefix}/output": output.detach().numpy(), f"{prefix}/input gradient": x.grad.numpy()}
    return found | branch_networks.state(model)


class _Recorded:
    """A transport that records its rounds and exchanges no rows."""

    def __init__(self, layer: str, rounds: list[Round], calls: dict[str, int]) -> None:
        self.transport, self.rounds, self.calls = LocalPipe(layer), rounds, calls
        # For reports of NaN: kernels that do nothing leave uninitialised memory.
        self.rank = self.transport.rank

    def run_slave(self, rows, key=None, **named):
        if key is None:
            layer = self.transport.layer
            self.calls[layer] = self.calls.get(layer, -1) + 1
            key = self.transport.key(0, self.calls[layer], "forward")
        self.rounds.append((key.layer, key.call, key.phase))
        return self.transport.run_slave(rows, key, **named)

    def key(self, step, call, phase):
        return self.transport.key(step, call, phase)


def _compiled(*_):
    return batchnorm.ExecutionMode.COMPILED


def _no_kernel(*_, **__):
    return lambda *_: None


def rounds_of(network: Network, *, is_compiled: bool) -> list[list[Round]]:
    """Each rank's rounds of the first step, in order; ranks with equally large shares run the same code."""
    by_size: dict[int, list[Round]] = {}
    for x in network.inputs(0):
        if len(x) in by_size:
            continue
        torch.compiler.reset()
        rounds: list[Round] = []
        calls: dict[str, int] = {}
        with (
            mock.patch.object(custom_op, "transport_of", lambda layer, *_, r=rounds, c=calls: _Recorded(layer, r, c)),
            mock.patch.object(batchnorm.SynchronizedBatchNorm, "_route", _compiled),
        ):
            model = client.convert_model(network.model())
            run = torch.compile(model, fullgraph=True, dynamic=network.dynamic) if is_compiled else model
            branch_networks.loss(_run(network, run, x.clone().requires_grad_())).backward()
        by_size[len(x)] = rounds
    return [by_size[len(x)] for x in network.inputs(0)]


def without_machine_code() -> mock._patch:
    """Has inductor skip the C++ compiler: kernels do nothing, and are called in the real order."""
    from torch._inductor.async_compile import AsyncCompile  # noqa: PLC0415 - takes seconds to import

    return mock.patch.object(AsyncCompile, "cpp_pybinding", _no_kernel)
