"""Conversion reports: what is synchronised in a model, and what is not and why."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils import parametrize

from client.data_parallel.replicate import DataParallelWithCallback
from client.layers import sharding
from client.layers.shortcut.bytecode import asks_for_attribute, instructions_of
from client.layers.synchronized import Synchronized

_TORCHS = nn.modules.batchnorm

# An instance that has one of these runs it in place of its class's `forward`, which would be ours.
BOUND = ("forward", "_compiled_call_impl")

# What ours have beside torch's: a class's own attributes and methods that are called so would be taken for ours.
NAMES = (
    *("layer_name", "group", "chunks", "eps_mode", "converted_from", "is_unreached", "commit_running_statistics"),
    *("forget_pending", "_adopted", "_can_be_torchs", "_counted", "_deferred", "_deferred_now", "_has_come"),
    *("_has_company", "_normalise", "_normalise_handed", "_normalise_traced", "_pass_by", "_replica", "_route"),
    *("_process_group_before", "_tally", "_told", "_traced", "_tracked_now"),
)

# How a `forward` names ours, and those of torch.
_OUR_NAMES = ("SynchronizedBatchNorm", "SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d")
_TORCHS_NAMES = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "_BatchNorm")

# The name of a function that adds up over torch's process group, as `differentiable_all_reduce` of fvcore does.
_COLLECTIVE = re.compile("all_?(?:reduce|gather)", re.IGNORECASE)

# How deep a `forward` is followed through the functions that it calls.
_DEPTH = 4

# Classes that nothing could be derived from, and what they said.
REFUSED: "WeakKeyDictionary[type, str]" = WeakKeyDictionary()

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)

BY_ITSELF = "its own forward calls torch's batch norm, not ours; call super().forward, or derive it from torch's class"

SHARDED = "sharded by FSDP; convert the model before"

# Classes named in a summary; the report has all layers.
_MOST_NAMED = 4


@dataclass(frozen=True)
class ConversionReport:
    """What `client.convert_model` has made of a model.

    Attributes:
        synchronised: the class of each synchronised layer, by its path in the model; of an adopted layer the class that
            it had.
        left: the class of each batch norm that is not synchronised, and the reason, by its path in the model.
    """

    synchronised: dict[str, str]
    left: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        kinds = Counter(self.synchronised.values())
        what = f"synchronised {_layers(len(self.synchronised))}"
        what += f" ({_counted(kinds)})" if kinds else ""
        return f"{what}; left {self.summary_of_left}" if self.left else what

    @property
    def summary_of_left(self) -> str:
        """What is left by class, with the first of each: `2 layers unsynchronised: 'head.norm' (MyNorm: ...)`."""
        described = {path: f"{kind}: {reason}" for path, (kind, reason) in self.left.items()}
        return f"{_layers(len(self.left))} unsynchronised: {in_brief(described)}"


def conversion_report(model: nn.Module) -> ConversionReport:
    """Tells what is synchronised in a model, and what is not and why.

    Args:
        model: any module, converted or not.

    Raises:
        TypeError: it is not a module.
    """
    check_is_module(model)
    sharded = set(sharding.parts_of(model))
    synchronised: dict[str, str] = {}
    left: dict[str, tuple[str, str]] = {}
    for path, module in places(model):
        if isinstance(module, Synchronized) and module.is_unreached:
            left[path] = (_name(module), "its forward did not call batch_norm in training")
        elif isinstance(module, Synchronized) and _goes_by_itself(type(module)):
            left[path] = (_name(module), BY_ITSELF)
        elif isinstance(module, Synchronized):
            synchronised[path] = _name(module)
        elif is_unsynchronised(module):
            reason = SHARDED if module in sharded else why_left(module) or "not converted"
            left[path] = (type(module).__qualname__, reason)
    return ConversionReport(synchronised, left)


def check_is_module(model: Any) -> None:
    """Raises TypeError where a model is not a module, but a class of modules, say, or a list of them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {model!r:.80}")


def places(module: nn.Module, place: str = "", seen: set[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules`, but what a wrapper wraps has the wrapper's own place, so names are the same without it."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield place, module
    for name, child in module._modules.items():  # noqa: SLF001 - a wrapper may hide its children from `named_children`
        if child is None:
            continue
        if isinstance(module, WRAPPERS) and name == "module":
            yield from places(child, place, seen)
        else:
            yield from places(child, f"{place}.{name}" if place else name, seen)


def _name(layer: Synchronized) -> str:
    return (layer.converted_from or type(layer)).__qualname__


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())


def in_brief(described: dict[str, str]) -> str:
    """Names the first layer of each description, and how many more there are.

    Args:
        described: what to say of each layer, by its path in the model.
    """
    first: dict[str, str] = {}
    for path, what in described.items():
        first.setdefault(what, path)
    counts = Counter(described.values())
    told = [_with_count(path, what, counts[what]) for what, path in list(first.items())[:_MOST_NAMED]]
    others = sum(counts[what] for what in list(first)[_MOST_NAMED:])
    more = [f"{_layers(others)} of {len(first) - _MOST_NAMED} more classes"] if others else []
    return ", ".join(told + more)


def _with_count(path: str, what: str, count: int) -> str:
    return f"{path!r} ({what})" + (f" and {count - 1} more of its class" if count > 1 else "")


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


def _goes_by_itself(kind: type[Synchronized]) -> bool:
    """Whether the first `forward` of a class is somebody's and calls torch's batch norm, not ours.

    It is in a class derived from ours, or was put into one after the conversion. What it hands to `batch_norm` is
    looked at only where it was there before.
    """
    forward = _undecorated(kind.forward)  # type: ignore[attr-defined]
    if not isinstance(forward, FunctionType) or _is_of(forward, "client"):
        return False
    names = _names(forward)
    if "forward" in names and names & {"super", *_OUR_NAMES}:
        return False  # in training it comes to ours, as far as names tell
    return _mention([forward], {"batch_norm"}) or ("forward" in names and not names.isdisjoint(_TORCHS_NAMES))


def has_own_forward(original: type[nn.Module]) -> bool:
    """Whether a class, or one between it and torch's, has a `forward`."""
    return any("forward" in vars(kind) for kind in own(original))


def _reaches_batch_norm(original: type[nn.Module]) -> bool:
    """Whether a class's `forward` may come to a call of `batch_norm`, by the names in it and in what it calls."""
    if not has_own_forward(original):
        return True
    return _mention(_own_functions(original), {"batch_norm", "forward"})


def _has_collective(original: type[nn.Module]) -> bool:
    """Whether a class's `forward` adds up its statistics itself, as detectron2's NaiveSyncBatchNorm.

    In training it comes to no `batch_norm`; in eval it calls `super().forward`.
    """
    forward = _undecorated(next((vars(kind)["forward"] for kind in own(original) if "forward" in vars(kind)), None))
    if not isinstance(forward, FunctionType):
        return False
    names = _names(forward)
    return "batch_norm" not in names and any(map(_COLLECTIVE.search, names))


def _checkpoints(original: type[nn.Module]) -> bool:
    """Whether a class has its call of `batch_norm` computed again, where nobody looks at its calls.

    What it does so by `super().forward` comes to ours by itself.
    """
    functions = _with_called(_own_functions(original))
    is_checkpoint_called = any("checkpoint" in _names(function) for function in functions)
    return is_checkpoint_called and any(map(_names_torchs_batch_norm, functions))


def _names_torchs_batch_norm(function: FunctionType) -> bool:
    names = _names(function)
    return "batch_norm" in names or ("forward" in names and not names.isdisjoint(_TORCHS_NAMES))


def _own_functions(original: type[nn.Module]) -> Iterator[FunctionType]:
    """The functions in a class and in those between it and torch's."""
    functions = (_undecorated(value) for kind in own(original) for value in vars(kind).values())
    yield from (function for function in functions if isinstance(function, FunctionType))


def _looping_in_subclasses(original: type[nn.Module]) -> str:
    """The method that calls itself without an end in each class derived from its own, or "".

    A layer that is converted has been made already, so its `__init__` may be like that.
    """
    methods = (method for method in _own_functions(original) if method.__name__ != "__init__")
    return next((method.__name__ for method in methods if _asks_super_of_its_self(method)), "")


def _asks_super_of_its_self(method: FunctionType) -> bool:
    """Whether it calls `super(self.__class__, self)` or `super(type(self), self)`."""
    if not {"super", "__class__"} <= (names := _names_in(method.__code__)) and not {"super", "type"} <= names:
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


def _mention(functions: Iterable[FunctionType], wanted: set[str]) -> bool:
    return any(_names(function) & wanted for function in _with_called(functions))


def _with_called(functions: Iterable[FunctionType]) -> Iterable[FunctionType]:
    """Functions, those that they call, as far as names tell, and those that these call."""
    found = newest = dict.fromkeys(functions)
    for _ in range(_DEPTH):
        called = dict.fromkeys(other for function in newest for other in _called(function))
        newest = {function: None for function in called if function not in found}
        found = found | newest
    return found


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """The functions behind the names in one, also as attributes of modules and classes, but for torch's and ours."""
    names = _names_in(function.__code__)
    values = [value for value in _values(function) if not _is_of(value, "torch")]
    attributes = (vars(value).get(name) for value in values if isinstance(value, ModuleType | type) for name in names)
    for other in map(_undecorated, (*values, *attributes)):
        if isinstance(other, FunctionType) and not _is_of(other, "torch") and not _is_of(other, "client"):
            yield other


def _values(function: FunctionType) -> Iterator[Any]:
    """What a function finds by its names outside of itself, and its defaults; of a `functools.partial` the function."""
    for value in _found(function):
        yield value.func if isinstance(value, functools.partial) else value


def _found(function: FunctionType) -> Iterator[Any]:
    """The same as it is; a decorator finds there what it decorates."""
    yield from (function.__globals__.get(name) for name in _names_in(function.__code__))
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # one that is still empty
            if name != "__class__":
                yield cell.cell_contents


def _is_of(value: Any, package: str) -> bool:
    """Whether a module, class or function is in a package."""
    if not isinstance(value, ModuleType | type | FunctionType):
        return False
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return isinstance(module, str) and module.partition(".")[0] == package


def _undecorated(function: Any) -> Any:
    return inspect.unwrap(function) if callable(function) else function


def _names(function: FunctionType) -> set[str]:
    """The names in a function, and the own names of functions that it calls by others."""
    functions = (value for value in _values(function) if isinstance(value, FunctionType | BuiltinFunctionType))
    return _names_in(function.__code__).union(value.__name__ for value in functions)


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
