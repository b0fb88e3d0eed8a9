"""Conversion reports: the synchronised and the unsynchronised layers of a model, and the reasons."""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils import parametrize

from client.data_parallel.replicate import DataParallelWithCallback
from client.nn import input_checks
from client.nn.layer import SynchronizedLayer

# The most classes in a summary; the report lists all layers.
_MAX_CLASSES = 4

# Attributes of an instance that torch calls instead of the `forward` of its class.
INSTANCE_FORWARDS = ("forward", "_compiled_call_impl")

# Names of functions that sum over torch's process group, such as fvcore's `differentiable_all_reduce`.
_COLLECTIVE = re.compile("all_?(?:reduce|gather)", re.IGNORECASE)

# Attributes that converted subclasses have and torch's layers do not, which `client.nn.subclasses` adds.
RESERVED_NAMES: list[str] = []

# Why deriving a synchronised class from a class failed.
class_errors: "WeakKeyDictionary[type, str]" = WeakKeyDictionary()


@dataclass(frozen=True)
class ConversionReport:
    """Result of `client.convert_model`.

    Attributes:
        synchronised: class of each synchronised layer, by its path in the model. For a converted subclass it is the
            original class.
        left: class and reason of each batch norm that is not synchronised, by its path in the model.
    """

    synchronised: dict[str, str]
    left: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        text = f"synchronised {layers(len(self.synchronised))}"
        classes = Counter(self.synchronised.values())
        if classes:
            text += f" ({', '.join(f'{number} {name}' for name, number in classes.most_common())})"
        return f"{text}; left {self.summary_of_left}" if self.left else text

    @property
    def summary_of_left(self) -> str:
        """Unsynchronised layers by class, with the first of each: `2 layers unsynchronised: 'norm' (MyNorm: ...)`."""
        descriptions = {path: f"{name}: {reason}" for path, (name, reason) in self.left.items()}
        return f"{layers(len(self.left))} unsynchronised: {summarize(descriptions)}"


def conversion_report(model: nn.Module) -> ConversionReport:
    """Report the synchronised and the unsynchronised layers of a model, with the reasons.

    Args:
        model: any module, converted or not.

    Raises:
        TypeError: `model` is not a module.
    """
    check_is_module(model)
    sharded = set(input_checks.sharded_modules(model))
    synchronised: dict[str, str] = {}
    left: dict[str, tuple[str, str]] = {}
    for path, module in named_modules(model):
        if isinstance(module, SynchronizedLayer):
            name = (module.converted_from or type(module)).__qualname__
            if module.is_bypassed:
                left[path] = (name, "its forward did not call batch_norm in training")
            elif _bypasses_ours(type(module)):
                remedy = "call super().forward, or derive it from torch's class"
                left[path] = (name, f"its forward calls torch's batch norm directly; {remedy}")
            else:
                synchronised[path] = name
        elif is_unsynchronised(module):
            is_sharded = module in sharded
            reason = "sharded by FSDP; convert the model first" if is_sharded else reason_not_synchronised(module)
            left[path] = (type(module).__qualname__, reason or "not converted")
    return ConversionReport(synchronised, left)


def check_is_module(model: Any) -> None:
    """Raise TypeError unless `model` is a module, not a class or a list of modules."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {model!r:.80}")


def named_modules(
    module: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Like `nn.Module.named_modules`, but paths omit the levels of DataParallel and DistributedDataParallel."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield path, module
    is_wrapper = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    for name, child in module._modules.items():  # noqa: SLF001 - a wrapper may hide its children from `named_children`
        if child is not None:
            inner = path if is_wrapper and name == "module" else f"{path}.{name}" if path else name
            yield from named_modules(child, inner, seen)


def layers(number: int) -> str:
    """Return "1 layer" or "n layers"."""
    return "1 layer" if number == 1 else f"{number} layers"


def summarize(descriptions: dict[str, str]) -> str:
    """Name the first layer of each description and the number of the others; the keys are paths."""
    paths: dict[str, list[str]] = {}
    for path, description in descriptions.items():
        paths.setdefault(description, []).append(path)
    parts = []
    for description, (path, *more) in list(paths.items())[:_MAX_CLASSES]:
        parts.append(f"{path!r} ({description})" + (f" and {len(more)} more of its class" if more else ""))
    if others := list(paths.values())[_MAX_CLASSES:]:
        parts.append(f"{layers(sum(map(len, others)))} of {len(others)} more classes")
    return ", ".join(parts)


def is_unsynchronised(module: nn.Module) -> bool:
    """Whether a module is torch's batch norm or DataParallel, not converted."""
    if isinstance(module, nn.DataParallel):
        # patch_replication_callback sets `replicate` on the instance
        return not isinstance(module, DataParallelWithCallback) and "replicate" not in vars(module)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SynchronizedLayer)  # noqa: SLF001


def has_own_forward(module: nn.Module) -> bool:
    """Whether an instance has a `forward` that replaces its class's, such as a compiled one."""
    return any(name in vars(module) for name in INSTANCE_FORWARDS)


def reason_not_synchronised(module: nn.Module) -> str:
    """Why an unsynchronised module cannot be converted; "" if it can."""
    if has_own_forward(module):
        return "compiled, or its forward was replaced; convert the model first"
    if parametrize.is_parametrized(module):
        return "parametrized; convert the model first"
    if isinstance(module, nn.DataParallel):
        return "" if type(module) is nn.DataParallel else "a subclass of nn.DataParallel"
    return _reserved_names_of(module) or reason_not_derivable(type(module))


def reason_not_derivable(original: type[nn.Module]) -> str:
    """Why no synchronised class can be derived from a class; "" if one can."""
    if not (isinstance(original, type) and issubclass(original, nn.modules.batchnorm._BatchNorm)):  # noqa: SLF001 - base of all
        return "expected a subclass of nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or torch's _BatchNorm"
    if issubclass(original, SynchronizedLayer):
        return "it is synchronised already"
    if issubclass(original, nn.SyncBatchNorm):
        return "it is a subclass of nn.SyncBatchNorm, which synchronises already"
    if issubclass(original, nn.modules.lazy.LazyModuleMixin):
        return "it is lazy; run one batch through the model first"
    return class_errors.get(original) or _problem_of_methods(original) or _reserved_names_of(original)


def _reserved_names_of(original: type[nn.Module] | nn.Module) -> str:
    names = [name for name in RESERVED_NAMES if hasattr(original, name)]
    return f"{' and '.join(names)}: synchronised layers have attributes of this name; rename them" if names else ""


def _problem_of_methods(original: type[nn.Module]) -> str:
    methods = [(name, value) for cls in user_classes(original) for name, value in vars(cls).items()]
    if any(name == "__call__" for name, _ in methods):
        return "it overrides __call__, which may bypass its forward"
    if _has_collective(next((value for name, value in methods if name == "forward"), None)):
        return "its forward synchronises already; see client.register_conversion"
    # `__init__` may do so: it has run before the conversion.
    if endless := next((name for name, value in methods if name != "__init__" and _calls_super_of_type(value)), ""):
        return f"its {endless} calls super(self.__class__, self), which recurses for ever in a subclass; write super()"
    return ""


def _has_collective(forward: Any) -> bool:
    """Whether a `forward` reduces its statistics itself, such as in detectron2's NaiveSyncBatchNorm.

    In training that class does not call `batch_norm`; in eval it calls `super().forward`.
    """
    names = _names_in(forward)
    return "batch_norm" not in names and any(map(_COLLECTIVE.search, names))


def _calls_super_of_type(method: Any) -> bool:
    """Whether a method calls `super(self.__class__, self)` or `super(type(self), self)`."""
    # Names are in the order of first use, so a method that uses either name earlier is missed.
    return any(one == "super" and other in {"__class__", "type"} for one, other in pairwise(_names_in(method)))


def _bypasses_ours(cls: type[SynchronizedLayer]) -> bool:
    """Whether the `forward` of a subclass of a synchronised class calls torch's `batch_norm`."""
    names = _names_in(cls.forward)  # type: ignore[attr-defined]
    return "batch_norm" in names and "forward" not in names  # with `forward` it may call ours in training


def _names_in(function: Any) -> tuple[str, ...]:
    """Names that a function's code reads, in the order of their first use; () for other objects."""
    if isinstance(function, FunctionType):  # other objects may have an endless chain of `__wrapped__`
        function = inspect.unwrap(function)
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def user_classes(original: type[nn.Module]) -> tuple[type, ...]:
    """A class and its bases down to torch's own."""
    bases = original.__mro__
    return bases[: next(place for place, cls in enumerate(bases) if cls.__module__ == nn.modules.batchnorm.__name__)]
