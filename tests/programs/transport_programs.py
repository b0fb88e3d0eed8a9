"""What processes do in `test_transparency.py`: every kind of call of a layer, over whichever transport they have."""

import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import client
from client.training import recalibration
from client.transports import device_rows
from support.sentences import says
from support.transports import reference_kernels

CHANNELS = 3

# Samples of each rank; the second has none.
SIZES = (4, 0, 2, 3)


def every_kind_of_call(process: Any) -> dict[str, np.ndarray]:
    """Each call's output and gradients, and the layer's buffers after the call."""
    found: dict[str, Tensor] = {}
    for number, (name, run) in enumerate(CALLS.items()):
        layer = _layer()
        x = _samples(process.rank, seed=number).requires_grad_()
        for what, tensor in {**run(layer, x), **dict(layer.named_buffers())}.items():
            found[f"{name}, {what}"] = tensor
    return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}


def by_reference(process: Any) -> dict[str, np.ndarray]:
    """As `every_kind_of_call`, with kernels that round alike on all transports."""
    with reference_kernels():
        return every_kind_of_call(process)


def compiled_for_devices(process: Any) -> dict[str, np.ndarray]:
    """A compiled layer with an input on a device, over a process group that gathers on the host."""
    with mock.patch.object(device_rows, "DEVICE_TYPES", frozenset({"cpu"})):
        return compiled(process)


def compiled(process: Any) -> dict[str, np.ndarray]:
    found = _compiled(_layer(), _samples(process.rank, seed=0).requires_grad_())
    return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}


def _layer(**options: Any) -> nn.Module:
    layer = client.SynchronizedBatchNorm1d(CHANNELS, dtype=torch.float64, **options)
    layer.layer_name = "layer"
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
    return layer


def _samples(rank: int, seed: int) -> Tensor:
    whole = torch.randn(sum(SIZES), CHANNELS, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return whole.split(SIZES)[rank]


def _gradients(layer: nn.Module, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    (output * output.detach().cumsum(0)).sum().backward()
    return {"output": output, "input": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


def _plain(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return _gradients(layer, x, layer(x))


def _masked(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    mask = torch.arange(x.shape[0] * 5).view(-1, 5) % 3 != 0
    return _gradients(layer, x, layer(x, mask))


def _twice_differentiated(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    output = layer(x)
    (by_input,) = torch.autograd.grad((output**3).sum(), x, create_graph=True)
    return _gradients(layer, x, by_input)


def _checkpointed(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return _gradients(layer, x, checkpoint(layer, x, use_reentrant=False))


def _used_twice(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return _gradients(layer, x, layer(layer(x).tanh()))


def _in_micro_batches(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    layer.chunks = 2
    return _gradients(layer, x, layer(x[: len(x) // 2]).sum() + layer(x[len(x) // 2 :]))


def _compiled(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.compiler.reset()
    return _gradients(
        layer, x, torch.compile(lambda y: layer(y * 2) + layer(y), backend="aot_eager", fullgraph=True)(x)
    )


class Annotated(Tensor):
    note = ""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(function, types, args, kwargs)
        if isinstance(output, Annotated):
            output.note = next((each.note for each in args if isinstance(each, Annotated)), "")
        return output


def _annotated(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    expected = _gradients(layer, x, layer(x).relu_())
    before = {name: tensor.clone() for name, tensor in expected.items()}
    x.grad = layer.weight.grad = layer.bias.grad = None
    given = x.as_subclass(Annotated)
    given.note = "left"
    output = layer(given).relu_()
    found = _gradients(layer, x, output)
    assert [output.note, layer.eval()(given).note] == ["left"] * 2
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    return found


def _traced_by_fx(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return _gradients(layer, x, torch.fx.symbolic_trace(nn.Sequential(nn.Tanh(), layer))(x))


def _refused_by_jit(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for deprecated in (DeprecationWarning, FutureWarning):  # torch 2.14 has a FutureWarning
            warnings.filterwarnings("ignore", ".torch.jit", deprecated)
        with pytest.raises(TypeError, check=says("layer 'layer': .* traced by torch.jit.trace in training mode")):
            torch.jit.trace(layer, x.detach())
    return {}


def _recalibrated(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    recalibration.recalibrate(layer, [batch for batch in x.detach().split(2) if len(batch)])
    return {}


CALLS = {
    "plain": _plain,
    "masked": _masked,
    "twice differentiated": _twice_differentiated,
    "checkpointed": _checkpointed,
    "used twice": _used_twice,
    "in micro-batches": _in_micro_batches,
    "compiled": _compiled,
    "of a subclass of Tensor": _annotated,
    "traced by torch.fx": _traced_by_fx,
    "refused to torch.jit": _refused_by_jit,
    "recalibrated": _recalibrated,
}
