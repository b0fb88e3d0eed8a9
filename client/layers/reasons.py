"""Reasons: why a batch norm is not synchronised by `convert_model`."""

from types import CodeType, FunctionType

from torch import nn
from torch.nn.utils import parametrize

from client.data_parallel.replicate import DataParallelWithCallback
from client.layers.synchronized import Synchronized

_TORCHS = nn.modules.batchnorm

# On an instance these are bound to it: a twin that took them over would go on running the old module.
BOUND = ("forward", "_compiled_call_impl")

# How deep a `forward` is followed through the functions that it calls.
_DEPTH = 4


def is_unsynchronised(module: nn.Module) -> bool:
    """Whether a module is a batch norm, or a wrapper of replicas, that is not ours."""
    if isinstance(module, nn.DataParallel):
        # patch_replication_callback leaves its mark on the instance
        return not isinstance(module, DataParallelWithCallback) and "replicate" not in vars(module)
    return isinstance(module, _TORCHS._BatchNorm) and not isinstance(module, Synchronized)  # noqa: SLF001


def why_left(module: nn.Module) -> str:
    """Reason that an unsynchronised module cannot be converted, or ""."""
    if any(name in vars(module) for name in BOUND):
        return "compiled, or given a forward of its own; convert it before"
    if parametrize.is_parametrized(module):
        return "parametrized; convert it before"
    if isinstance(module, nn.DataParallel):
        return "" if type(module) is nn.DataParallel else "a subclass of nn.DataParallel"
    return why_not(type(module))


def why_not(original: type[nn.Module]) -> str:
    """Reason that a class cannot be adopted, or ""."""
    if not issubclass(original, _TORCHS._BatchNorm):  # noqa: SLF001 - torch's own name for all of them
        return "expected a subclass of nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d"
    if issubclass(original, Synchronized):
        return "it is synchronised already"
    if issubclass(original, nn.SyncBatchNorm):
        return "it synchronises by itself, as a subclass of nn.SyncBatchNorm"
    if issubclass(original, nn.modules.lazy.LazyModuleMixin):
        return "it is lazy; run one batch through the model first"
    if not _reaches_batch_norm(original):
        return "its forward does not call batch_norm"
    return ""


def _reaches_batch_norm(original: type[nn.Module]) -> bool:
    """Whether a class's `forward` may come to a call of `batch_norm`, by the names in it and in what it calls."""
    own = original.__mro__[: original.__mro__.index(_torchs_own(original))]
    functions = [value for kind in own for value in vars(kind).values() if isinstance(value, FunctionType)]
    if not any("forward" in vars(kind) for kind in own):
        return True
    return any(_mentions(function, _DEPTH) for function in functions)


def _torchs_own(original: type[nn.Module]) -> type[nn.Module]:
    return next(kind for kind in original.__mro__ if kind.__module__ == _TORCHS.__name__)


def _mentions(function: FunctionType, depth: int) -> bool:
    names = _names(function.__code__)
    if names & {"batch_norm", "forward"}:
        return True
    called = (function.__globals__.get(name) for name in names)
    return depth > 0 and any(_mentions(other, depth - 1) for other in called if isinstance(other, FunctionType))


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
