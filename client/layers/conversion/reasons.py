"""Reasons: why a layer, or all layers of a class, cannot be converted."""

import re
from collections.abc import Iterator
from itertools import pairwise
from types import FunctionType
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils import parametrize

from client.layers.conversion.bytecode import asks_for_attribute, instructions_of
from client.layers.conversion.names_in_functions import (
    comes_to,
    functions_in,
    innermost,
    is_of,
    mention,
    names_in,
    names_of,
    with_called,
)
from client.layers.synchronized import Synchronized

_TORCHS = nn.modules.batchnorm

# An instance that has one of these runs it in place of its class's `forward`, which would be ours.
BOUND = ("forward", "_compiled_call_impl")

# What ours have beside torch's: a class's own attributes and methods that are called so would be taken for ours.
NAMES = (
    *("layer_name", "group", "chunks", "eps_mode", "converted_from", "is_unreached", "commit_running_statistics"),
    *("forget_pending", "_adopted", "_can_be_torchs", "_deferred", "_deferred_now", "_ended", "_has_come"),
    *("_has_company", "_normalise", "_normalise_handed", "_normalise_plainly", "_normalise_traced", "_pass_by"),
    *("_process_group_before", "_tally", "_told", "_traced", "_tracked_now", "_missed", "_replica", "_route"),
)

# How a `forward` names ours, and those of torch.
_OUR_NAMES = ("SynchronizedBatchNorm", "SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d")

_TORCHS_NAMES = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "_BatchNorm")

# The name of a function that adds up over torch's process group, as `differentiable_all_reduce` of fvcore does.
_COLLECTIVE = re.compile("all_?(?:reduce|gather)", re.IGNORECASE)

# Classes that nothing could be derived from, and what they said.
REFUSED: "WeakKeyDictionary[type, str]" = WeakKeyDictionary()


def why_left(module: nn.Module) -> str:
    """Reason that an unsynchronised module cannot be converted, or ""."""
    if any(name in vars(module) for name in BOUND):
        return "compiled, or given a forward of its own; convert it before"
    if parametrize.is_parametrized(module):
        return "parametrized; convert it before"
    if isinstance(module, nn.DataParallel):
        return "" if type(module) is nn.DataParallel else "a subclass of nn.DataParallel"
    return _why_not_by_names(module) or why_not(type(module))


def why_not(original: type[nn.Module]) -> str:
    """Reason that a class cannot be adopted, or ""."""
    if not (isinstance(original, type) and issubclass(original, _TORCHS._BatchNorm)):  # noqa: SLF001 - torch's own name for all of them
        return "expected a subclass of nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or torch's _BatchNorm"
    if issubclass(original, Synchronized):
        return "it is synchronised already"
    if issubclass(original, nn.SyncBatchNorm):
        return "it synchronises by itself, as a subclass of nn.SyncBatchNorm"
    if issubclass(original, nn.modules.lazy.LazyModuleMixin):
        return "it is lazy; run one batch through the model first"
    return REFUSED.get(original) or _why_not_by_forward(original) or _why_not_by_names(original)


def _why_not_by_names(original: type[nn.Module] | nn.Module) -> str:
    names = [name for name in NAMES if hasattr(original, name)]
    return f"{' and '.join(names)}: synchronised layers have attributes called so too; rename its own" if names else ""


def _why_not_by_forward(original: type[nn.Module]) -> str:
    if any("__call__" in vars(kind) for kind in own(original)):
        return "it has a __call__ of its own, which need not come to its forward"
    if _has_collective(original):
        return "its forward synchronises by itself; client.register_conversion says how to convert it"
    if _checkpoints(original):
        return "its forward checkpoints its call of batch_norm; checkpoint the layer where it is called"
    if looping := _looping_in_subclasses(original):
        return f"its {looping} calls super(self.__class__, self), endless in classes derived from it; write super()"
    return "" if _reaches_batch_norm(original) else "its forward does not call batch_norm"


def goes_by_itself(kind: type[Synchronized]) -> bool:
    """Whether the first `forward` of a class is somebody's and calls torch's batch norm, not ours.

    It is in a class derived from ours, or was put into one after the conversion. What it hands to `batch_norm` is
    looked at only where it was there before.
    """
    forward = innermost(kind.forward)  # type: ignore[attr-defined]
    if not isinstance(forward, FunctionType) or is_of(forward, "client"):
        return False
    names = names_of(forward)
    if "forward" in names and names & {"super", *_OUR_NAMES}:
        return False  # in training it comes to ours, as far as names tell
    return mention([forward], {"batch_norm"}) or ("forward" in names and not names.isdisjoint(_TORCHS_NAMES))


def has_own_forward(original: type[nn.Module]) -> bool:
    """Whether a class, or one between it and torch's, has a `forward`."""
    return any("forward" in vars(kind) for kind in own(original))


def _reaches_batch_norm(original: type[nn.Module]) -> bool:
    """Whether a class's `forward` may come to a call of `batch_norm`, by the names in it and in what it calls."""
    if not has_own_forward(original):
        return True
    return mention(_own_functions(original), {"batch_norm", "forward"})


def _has_collective(original: type[nn.Module]) -> bool:
    """Whether a class's `forward` adds up its statistics itself, as detectron2's NaiveSyncBatchNorm.

    In training it comes to no `batch_norm`; in eval it calls `super().forward`.
    """
    forward = innermost(next((vars(kind)["forward"] for kind in own(original) if "forward" in vars(kind)), None))
    if not isinstance(forward, FunctionType):
        return False
    names = names_of(forward)
    return "batch_norm" not in names and any(map(_COLLECTIVE.search, names))


def _checkpoints(original: type[nn.Module]) -> bool:
    """Whether a class has its call of `batch_norm` computed again, where nobody looks at its calls.

    What it does so by `super().forward` comes to ours by itself.
    """
    methods = [*_own_functions(original)]
    for function in with_called(methods):
        if comes_to(function, "checkpoint", "torch.utils.checkpoint"):
            named = [method for method in methods if method.__name__ in names_in(function.__code__)]
            if any(map(_names_torchs_batch_norm, with_called([function, *named]))):
                return True
    return False


def _names_torchs_batch_norm(function: FunctionType) -> bool:
    names = names_of(function)
    return "batch_norm" in names or ("forward" in names and not names.isdisjoint(_TORCHS_NAMES))


def _own_functions(original: type[nn.Module]) -> Iterator[FunctionType]:
    """The functions in a class and in those between it and torch's, but for torch's decorators."""
    functions = (found for kind in own(original) for value in vars(kind).values() for found in functions_in(value))
    yield from (function for function in functions if not is_of(function, "torch"))


def _looping_in_subclasses(original: type[nn.Module]) -> str:
    """The method that calls itself without an end in each class derived from its own, or "".

    A layer that is converted has been made already, so its `__init__` may be like that.
    """
    methods = (method for method in _own_functions(original) if method.__name__ != "__init__")
    return next((method.__name__ for method in methods if _asks_super_of_its_self(method)), "")


def _asks_super_of_its_self(method: FunctionType) -> bool:
    """Whether it calls `super(self.__class__, self)` or `super(type(self), self)`."""
    if not {"super", "__class__"} <= (names := names_in(method.__code__)) and not {"super", "type"} <= names:
        return False  # without a look at each instruction
    for (one, after), (_, third) in pairwise(instructions_of(method.__code__)):
        if one.opname != "LOAD_GLOBAL" or one.argval != "super":
            continue
        if after.opname == "LOAD_GLOBAL" and after.argval == "type":
            return True
        if asks_for_attribute(third) and third.argval == "__class__":
            return True
    return False


def own(original: type[nn.Module]) -> tuple[type, ...]:
    """A class and those between it and torch's."""
    return original.__mro__[: original.__mro__.index(_torchs_own(original))]


def _torchs_own(original: type[nn.Module]) -> type[nn.Module]:
    return next(kind for kind in original.__mro__ if kind.__module__ == _TORCHS.__name__)
