"""Checks of inputs, distributed tensors and torch's tracers.

Torch's classes for distributed tensors are looked up in `sys.modules`, because importing them is slow.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx import Proxy, Tracer
from torch.overrides import has_torch_function

from statsd_bn.text import wrap

FunctionT = TypeVar("FunctionT", bound=Any)

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of inputs, as in torch's batch norm


def check_input(layer: Any, x: Tensor, expected: int | None = None) -> None:
    """Raise TypeError or ValueError unless a layer can normalise `x`; `expected` channels default to the layer's."""
    if x.dtype not in TYPES:
        remedy = "; quantise the model after client.revert_model(model)" if x.is_quantized else ""
        dtype = f"{str(x.dtype).removeprefix('torch.')}{remedy}"
        raise _error(TypeError, layer, f"expected an input of float16, bfloat16, float32 or float64, got {dtype}")
    channels = x.shape[1]
    if layer.num_features == 0:  # of a lazy layer
        layer.num_features = channels_of(layer, channels)
    # Under torch.jit.trace `channels` is a tensor, and reading it warns; torch's operator checks the number as well.
    if type(channels) is not int and isinstance(channels, Tensor):
        return
    if expected is None and channels == layer.num_features:
        return
    # After pruning by hand `num_features` may be wrong.
    expected = channels_of(layer, layer.num_features) if expected is None else expected
    if channels != expected:
        problem = f"expected {expected} channels, got {channels} (input of shape {tuple(x.shape)})"
        raise _error(ValueError, layer, problem)


def check_not_distributed(layer: Any, *tensors: Tensor | None) -> None:
    """Raise TypeError if one of the tensors is a DTensor."""
    if any(map(is_distributed, tensors)):
        remedy = "pass input.to_local() if the input is sharded by samples, and do not shard the layer's parameters"
        raise _error(TypeError, layer, f"expected a local input and local parameters, got a DTensor; {remedy}")


def check_mask(layer: Any, x: Tensor, mask: Tensor) -> None:
    """Raise TypeError or ValueError unless a mask is boolean, of shape (N, *), and on the device of `x`."""
    if mask.dtype != torch.bool:
        raise _error(TypeError, layer, f"expected a boolean mask, got {mask.dtype}")
    expected = (x.shape[0], *x.shape[2:])
    if mask.shape != expected or mask.device != x.device:
        shape = f"of shape {tuple(expected)} on {x.device}, as the input without its channels"
        raise _error(ValueError, layer, f"expected a mask {shape}, got {tuple(mask.shape)} on {mask.device}")


def _error(kind: type[Exception], layer: Any, problem: str) -> Exception:
    return kind(wrap(f"layer {layer.layer_name!r}: {problem}"))


def channels_of(layer: Any, default: int | None = None) -> Any:
    """Channels of the tensors of a layer or a `BatchNormCall`; `default` without tensors."""
    for tensor in (layer.weight, layer.running_mean, layer.bias):
        if tensor is not None:
            return tensor.shape[0]
    return default


def parameters_of(layer: Any) -> tuple[Any, Any]:
    """Weight and bias of a layer; reading the dictionary is ten times faster than `nn.Module.__getattr__`."""
    parameters = getattr(layer, "_parameters", {})
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return layer.weight, layer.bias  # of a `BatchNormCall`, or of a parametrized layer


def is_distributed(tensor: Tensor | None) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharded_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that FSDP has sharded; version 1 wraps a module, version 2 changes its class."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ()
    for part in module.modules():
        if isinstance(part, wrappers):
            yield from part.modules()  # parts of a FullyShardedDataParallel do not show that they are sharded
        elif any(map(is_distributed, part.parameters(recurse=False))):
            yield part  # FSDP may have sharded a larger model that contains `module`


def tracing_error(layer: Any, tracing: str) -> Exception:
    """Error for a tracer that cannot record an exchange; `tracing` is a text such as "traced by torch.jit.trace"."""
    remedy = "use client.revert_model(model), which restores torch's layers"
    return _error(TypeError, layer, f"a synchronised layer cannot be {tracing}; {remedy}")


def constant_in_trace(function: FunctionT) -> FunctionT:
    """Let torch.compile evaluate a function while it traces; `assume_constant_result` would import the compiler."""
    function._dynamo_marked_constant = True  # noqa: SLF001 - has no public name
    return function


def fx_proxy(layer: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """The `Proxy` of the call's result if torch.fx traces it, else None; the graph calls the layer as a module."""
    # If the traced root takes `*args`, torch.fx passes one Proxy for all of them.
    values = (arguments,) if isinstance(arguments, Proxy) else (*arguments, *named.values())
    if is_compiling() or not has_torch_function(values):
        return None
    proxies = [value for value in values if isinstance(value, Proxy)]
    if not proxies:
        return None
    tracer = proxies[0].tracer
    path = tracer.path_of_module(layer) if isinstance(tracer, Tracer) else ""
    # Hooks would run during the trace as well.
    if not path or layer._forward_hooks or layer._forward_pre_hooks:  # noqa: SLF001 - they have no public names
        raise tracing_error(layer, f"traced by torch.fx {'with its hooks' if path else 'as the root module'}")
    return tracer.create_proxy("call_module", path, tuple(arguments), named)
