"""Reasons: why a layer, or all layers of a class, cannot be converted."""

import inspect
import re
from itertools import pairwise
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils import parametrize

from client.nn.synchronized import Synchronized

_TORCHS = nn.modules.batchnorm

# An instance that has one of these runs it in place of its class's `forward`, which would be ours.
BOUND = ("forward", "_compiled_call_impl")

# What ours have beside torch's: a class's own attributes and methods that are called so would be taken for ours.
NAMES = (
    *("layer_name", "group", "chunks", "eps_mode", "converted_from", "is_unreached", "commit_running_statistics"),
    *("forget_pending", "_adopted", "_can_be_torchs", "_deferred", "_deferred_now", "_has_come"),
    *("_has_company", "_normalise", "_normalise_handed", "_normalise_traced", "_pass_by"),
    *("_process_group_before", "_tally", "_told", "_traced", "_tracked_now", "_missed", "_replica", "_route"),
)

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
    methods = [(name, value) for kind in own(original) for name, value in vars(kind).items()]
    if any(name == "__call__" for name, _ in methods):
        return "it has a __call__ of its own, which need not come to its forward"
    if _has_collective(next((value for name, value in methods if name == "forward"), None)):
        return "its forward synchronises by itself; client.register_conversion says how to convert it"
    # A layer that is converted has been made already, so its `__init__` may be like that.
    if looping := next((name for name, value in methods if name != "__init__" and _asks_super_of_its_self(value)), ""):
        return f"its {looping} calls super(self.__class__, self), endless in classes derived from it; write super()"
    return ""


def _has_collective(forward: Any) -> bool:
    """Whether a `forward` adds up its statistics itself, as detectron2's NaiveSyncBatchNorm.

    In training it comes to no `batch_norm`; in eval it calls `super().forward`.
    """
    names = _names_in(forward)
    return "batch_norm" not in names and any(map(_COLLECTIVE.search, names))


def _asks_super_of_its_self(method: Any) -> bool:
    """Whether it calls `super(self.__class__, self)` or `super(type(self), self)`, if it names neither before."""
    return any(one == "super" and other in {"__class__", "type"} for one, other in pairwise(_names_in(method)))


def goes_by_itself(kind: type[Synchronized]) -> bool:
    """Whether the `forward` of a class that is derived from ours calls torch's `batch_norm` in place of ours."""
    names = _names_in(kind.forward)  # type: ignore[attr-defined]
    return "batch_norm" in names and "forward" not in names  # else it may come to ours in training


def _names_in(function: Any) -> tuple[str, ...]:
    """The names that the code of a function reads, in the order of their first use; none of anything else."""
    if isinstance(function, FunctionType):  # some other objects say that they wrap without an end
        function = inspect.unwrap(function)
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def own(original: type[nn.Module]) -> tuple[type, ...]:
    """A class and those between it and torch's."""
    return original.__mro__[: original.__mro__.index(_torchs_own(original))]


def _torchs_own(original: type[nn.Module]) -> type[nn.Module]:
    return next(kind for kind in original.__mro__ if kind.__module__ == _TORCHS.__name__)
