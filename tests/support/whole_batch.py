"""A layer on shards compared with `torch.nn.BatchNorm` on the whole batch, with the programs of member processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import client
from client.data_parallel import any_device
from client.data_parallel.replicate import execute_replication_callbacks

KINDS = {
    "1d of (N, C)": (nn.BatchNorm1d, ()),
    "1d of (N, C, L)": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (4, 3)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
SYNCHRONISED = {
    nn.BatchNorm1d: client.SynchronizedBatchNorm1d,
    nn.BatchNorm2d: client.SynchronizedBatchNorm2d,
    nn.BatchNorm3d: client.SynchronizedBatchNorm3d,
}
CHANNELS = 6

Result = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One layer and a split batch; `options` are the layer's keyword arguments, `frozen` names its fixed parameters."""

    kind: str
    sizes: tuple[int, ...]
    dtype: str = "float64"
    offset: float = 0.5
    scale: float = 2.0
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Input, factors of the loss, and the layer's initial state, the same in every process."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        shape = (sum(self.sizes), CHANNELS, *KINDS[self.kind][1])
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * self.scale + self.offset
        factors = torch.randn(shape, generator=generator, dtype=torch.float64)
        state = {name: torch.rand(CHANNELS, generator=generator) + 0.5 for name in ("weight", "running_var")}
        state |= {name: torch.randn(CHANNELS, generator=generator) for name in ("bias", "running_mean")}
        state = {name: value.to(dtype) for name, value in state.items()}
        return x.to(dtype), factors.to(dtype), state | {"num_batches_tracked": torch.tensor(3)}

    def layer(self, *, synchronised: bool) -> nn.Module:
        plain = KINDS[self.kind][0]
        options = {"dtype": getattr(torch, self.dtype), **dict(self.options)}
        layer = (SYNCHRONISED[plain] if synchronised else plain)(CHANNELS, **options)
        layer.load_state_dict({name: value for name, value in self.tensors()[2].items() if name in layer.state_dict()})
        for name in self.frozen:
            layer.get_parameter(name).requires_grad_(requires_grad=False)
        if synchronised:
            layer.layer_name = "bn"
        return layer


def on_the_whole_batch(case: Case) -> Result:
    x, factors, _ = case.tensors()
    layer = case.layer(synchronised=False)
    output, gradient = _step(layer, x, factors)
    return _result(layer, output, gradient)


def as_member(connection: client.Connection, case: Case) -> Result:
    return run_shard(case, case.layer(synchronised=True), connection.rank)


def as_member_in_each(connection: client.Connection, cases: Sequence[Case]) -> list[Result]:
    return [as_member(connection, case) for case in cases]


def run_shard(case: Case, layer: nn.Module, shard: int) -> Result:
    x, factors, _ = case.tensors()
    output, gradient = _step(layer, x.split(case.sizes)[shard], factors.split(case.sizes)[shard])
    return _result(layer, output, gradient)


def as_virtual_replicas(case: Case, sizes: tuple[int, ...] | None = None, skip: int = 0) -> Result:
    sizes = case.sizes if sizes is None else sizes
    layer = case.layer(synchronised=True)
    x, factors, _ = case.tensors()
    x, factors = (whole.narrow(0, skip, sum(sizes)) for whole in (x, factors))
    x.requires_grad_()
    devices = [torch.device("cpu")] * len(sizes)
    replicas = any_device.replicate(layer, devices)
    execute_replication_callbacks(replicas)
    barrier = vars(replicas[0])["_barrier"]
    inputs = [(shard,) for shard in x.split(sizes)]
    outputs = any_device.parallel_apply(replicas, inputs, [{}] * len(sizes), devices, barrier)
    output = torch.cat(outputs)
    (output * factors).sum().backward()
    return _result(layer, output, x.grad)


def as_member_with_virtual_replicas(connection: client.Connection, case: Case, sizes: list[Any]) -> Result:
    member = connection.rank
    skip = sum(sum(before) for before in sizes[:member])
    return as_virtual_replicas(case, tuple(sizes[member]), skip)


def joined(results: list[Result]) -> Result:
    """The members' joint result: shards joined, parameter gradients summed, buffers equal on all."""
    together = {name: np.concatenate([result[name] for result in results]) for name in ("output", "input gradient")}
    together |= {
        name: np.sum([result[name] for result in results], axis=0)
        for name in ("weight gradient", "bias gradient")
        if name in results[0]
    }
    for name in results[0].keys() - together.keys():
        for result in results:
            assert result[name].tobytes() == results[0][name].tobytes(), f"{name} differs between members"
        together[name] = results[0][name]
    return together


def assert_equal_to_whole_batch(found: Result, case: Case) -> None:
    """Calls `assert_equal` with a tolerance of 1e-10 in float64, 1e-5 in float32."""
    assert_equal(found, on_the_whole_batch(case), 1e-10 if case.dtype == "float64" else 1e-5)


def assert_equal(found: Result, expected: Result, tolerance: float) -> None:
    """Compares with a tolerance relative to the largest value of each tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype, name
        size = np.abs(value).max(initial=1e-300)
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance * size, err_msg=name)


def _step(layer: nn.Module, x: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * factors).sum().backward()
    return output, x.grad


def _result(layer: nn.Module, output: torch.Tensor, gradient: torch.Tensor) -> Result:
    tensors = {
        "output": output,
        "input gradient": gradient,
        **{f"{name} gradient": parameter.grad for name, parameter in layer.named_parameters()},
        **dict(layer.named_buffers()),
    }
    return {name: tensor.detach().numpy() for name, tensor in tensors.items() if tensor is not None}
