"""convert_model and its inverse: from torch's layers to ours, keeping everything else.

A converted layer takes over the whole state of the old one (the same parameter and buffer objects, hooks, training
mode), so optimizers and checkpoints made before the conversion go on working.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

from torch import nn

from client.batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
)
from client.replicate import DataParallelWithCallback

M = TypeVar("M", bound=nn.Module)

SYNCHRONISED: dict[type[nn.Module], type[SynchronizedBatchNorm]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}
PLAIN = {ours: torchs for torchs, ours in SYNCHRONISED.items()}


def convert_model(module: nn.Module) -> nn.Module:
    """Replaces every `nn.BatchNorm1d/2d/3d` in `module` by its synchronised twin, and names it by its place.

    An `nn.DataParallel` is unwrapped and wrapped again as `DataParallelWithCallback`. Subclasses of torch's layers
    are left as they are.

    Args:
        module: any module; containers are changed in place.

    Returns:
        The module, or its replacement if it is itself a batch norm or an `nn.DataParallel`.
    """
    if isinstance(module, nn.DataParallel) and not isinstance(module, DataParallelWithCallback):
        if not module.device_ids:
            return DataParallelWithCallback(convert_model(module.module))
        return DataParallelWithCallback(
            convert_model(module.module), module.device_ids, module.output_device, module.dim
        )
    inner = module.module if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel) else module
    converted = _replace(inner, SYNCHRONISED, {})
    for place, layer in converted.named_modules():
        if isinstance(layer, SynchronizedBatchNorm):
            layer.layer_name = place or type(layer).__name__
    if inner is module:
        return converted
    module.module = converted
    return module


def revert_model(module: nn.Module) -> nn.Module:
    """Replaces every synchronised layer in `module` by torch's own.

    Args:
        module: any module; containers are changed in place.

    Returns:
        The module, or its replacement if it is itself a synchronised layer.
    """
    return _replace(module, PLAIN, {})


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """While it lasts, `nn.BatchNorm1d/2d/3d` make synchronised layers; torch's own come back whatever happens."""
    with ExitStack() as stack:
        for torchs, ours in SYNCHRONISED.items():
            stack.enter_context(mock.patch.object(nn, torchs.__name__, ours))
        yield


def _replace(module: nn.Module, kinds: dict[Any, Any], replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replaces by exact type; a module that is used in two places stays one module."""
    if module in replaced:
        return replaced[module]
    if type(module) in kinds:
        replaced[module] = _as(kinds[type(module)], module)
        return replaced[module]
    replaced[module] = module
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _replace(child, kinds, replaced)
    return module


def _as(kind: type[M], old: nn.Module) -> M:
    """Returns a `kind` that takes over the state of `old`."""
    new = kind.__new__(kind)
    ours = {"eps_mode", "layer_name"}
    new.__dict__.update({name: value for name, value in vars(old).items() if name not in ours})
    if isinstance(new, SynchronizedBatchNorm):
        new.eps_mode = "plus"
    return new
