"""Conversion reports: what is synchronised in a model, and what is not and why."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from client.data_parallel.replicate import DataParallelWithCallback
from client.nn import input_checks
from client.nn.conversion.reasons import goes_by_itself, why_left
from client.nn.synchronized import Synchronized

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
    sharded = set(input_checks.parts_of(model))
    synchronised: dict[str, str] = {}
    left: dict[str, tuple[str, str]] = {}
    for path, module in places(model):
        if isinstance(module, Synchronized) and module.is_unreached:
            left[path] = (_name(module), "its forward did not call batch_norm in training")
        elif isinstance(module, Synchronized) and goes_by_itself(type(module)):
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
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, Synchronized)  # noqa: SLF001
