"""Conversion reports: what is synchronised in a model, and what is not and why."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from client.layers import sharding
from client.layers.reasons import is_unsynchronised, why_left
from client.layers.synchronized import Synchronized

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)

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
        """What is left by class, with the first of each: `2 layers unsynchronised: head.norm (MyNorm: ...)`."""
        first: dict[tuple[str, str], str] = {}
        for path, kind_and_reason in self.left.items():
            first.setdefault(kind_and_reason, path)
        counts = Counter(self.left.values())
        told = [_told(path, *key, counts[key]) for key, path in list(first.items())[:_MOST_NAMED]]
        more = [f"{len(first) - _MOST_NAMED} more classes"] if len(first) > _MOST_NAMED else []
        return f"{_layers(len(self.left))} unsynchronised: {', '.join(told + more)}"


def conversion_report(model: nn.Module) -> ConversionReport:
    """Tells what is synchronised in a model, and what is not and why.

    Args:
        model: any module, converted or not.
    """
    sharded = set(sharding.parts_of(model))
    synchronised: dict[str, str] = {}
    left: dict[str, tuple[str, str]] = {}
    for path, module in places(model):
        if isinstance(module, Synchronized):
            synchronised[path] = (module.converted_from or type(module)).__qualname__
        elif is_unsynchronised(module):
            reason = (
                "sharded by FSDP; convert the model before"
                if module in sharded
                else why_left(module) or "not converted"
            )
            left[path] = (type(module).__qualname__, reason)
    return ConversionReport(synchronised, left)


def places(module: nn.Module, place: str = "", seen: set[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules`, but what a wrapper wraps has the wrapper's own place, so names are the same without it."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield place, module
    for name, child in module.named_children():
        if isinstance(module, WRAPPERS) and name == "module":
            yield from places(child, place, seen)
        else:
            yield from places(child, f"{place}.{name}" if place else name, seen)


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())


def _told(path: str, kind: str, reason: str, count: int) -> str:
    return f"{path!r} ({kind}: {reason})" + (f" and {count - 1} more of its class" if count > 1 else "")
