"""Compares a network in two synchronised replicas with the same network on the whole batch."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import client
from client.nn.batchnorm import SynchronizedBatchNorm
from zoo.catalogue import layers_of
from zoo.specimen import Specimen, Unfit, tensors_of

DEVICES = ["cpu"] * 2

# The most characters in a log line or warning of a conversion.
LONGEST_LINE = 300

# The least scale of a gradient, relative to the largest gradient. A bias before a batch norm has smaller gradients,
# which are rounding errors only.
FAINT = 1e-6


@dataclass(frozen=True)
class Comparison:
    layers: tuple[tuple[str, int], ...]  # batch norms by class
    differences: dict[str, float]  # largest relative difference of each kind of result
    unsynchronised: float  # difference of the outputs without synchronisation
    complaints: list[str]  # other faults, such as a layer left unsynchronised

    @property
    def largest(self) -> float:
        return max(self.differences.values())


@dataclass
class Output:
    lines: list[logging.LogRecord] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def compare(specimen: Specimen) -> Comparison:
    whole, twin = specimen.model, copy.deepcopy(specimen.model)
    alone = _alone(copy.deepcopy(whole), specimen.inputs)
    before = _Anatomy(twin)
    with _captured() as output:
        converted = client.convert_model(twin)
        found = _step(client.DataParallelWithCallback(converted, DEVICES), specimen.inputs)
        report = client.conversion_report(converted)
    expected = _step(whole, specimen.inputs)
    differences = _differences(found, expected) | {
        "parameters' gradients": _gradients_apart(converted, whole),
        "buffers": _apart(list(converted.buffers()), list(whole.buffers())),
    }
    unsynchronised = _apart(alone, expected["output"])
    complaints = [*_log_faults(output), *(f"{path}: {kind}: {why}" for path, (kind, why) in report.left.items())]
    if len(report.synchronised) != sum(isinstance(part, SynchronizedBatchNorm) for part in converted.modules()):
        complaints.append("the report lacks layers")
    complaints += before.complaints_of(client.revert_model(converted))
    return Comparison(layers_of(whole), differences, unsynchronised, complaints)


class _Anatomy:
    """The modules and tensors of a model, to compare after conversion and reversion."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = [(path, type(part), part) for path, part in model.named_modules()]
        self._tensors = [*model.named_parameters(), *model.named_buffers()]

    def complaints_of(self, reverted: nn.Module) -> Iterator[str]:
        parts = list(reverted.named_modules())
        if [path for path, *_ in self._parts] != [path for path, _ in parts]:
            yield "the reverted model has other modules"
            return
        for (path, kind, part), (_, now) in zip(self._parts, parts, strict=True):
            if type(now) is not kind:
                yield f"reverted, {path} is a {type(now).__name__}"
            if now is not part:
                yield f"reverted, {path} is another object"
        tensors = [*reverted.named_parameters(), *reverted.named_buffers()]
        if not all(
            one[0] == other[0] and one[1] is other[1] for one, other in zip(self._tensors, tensors, strict=True)
        ):
            yield "the reverted model has other tensors"


def _step(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    given = [x.clone().requires_grad_() for x in inputs]
    outputs = tensors_of(run(*given))
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]
    sum((output * factor).sum() for output, factor in zip(outputs, factors, strict=True)).backward()
    return {"output": [output.detach() for output in outputs], "input gradient": [x.grad for x in given]}


def _alone(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs without synchronisation."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            return tensors_of(client.DataParallelWithCallback(model, DEVICES)(*inputs))
    except Exception as error:
        raise Unfit(f"cannot be replicated: {type(error).__name__}: {error}".splitlines()[0][:200]) from error


def _differences(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> dict[str, float]:
    return {name: _apart(found[name], tensors) for name, tensors in expected.items()}


def _gradients_apart(converted: nn.Module, whole: nn.Module) -> float:
    found, expected = ([parameter.grad for parameter in model.parameters()] for model in (converted, whole))
    if [one is None for one in found] != [one is None for one in expected]:
        return float("inf")
    found, expected = ([one for one in gradients if one is not None] for gradients in (found, expected))
    least = FAINT * max((one.abs().max().item() for one in expected if one.numel()), default=0.0)
    return _apart(found, expected, least)


def _apart(found: list[Tensor], expected: list[Tensor], least: float = 0.0) -> float:
    """The largest difference between two lists of tensors; infinite if their shapes differ."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float("inf")
    return max((_relative(one, other, least) for one, other in zip(found, expected, strict=True)), default=0.0)


def _relative(found: Tensor, expected: Tensor, least: float) -> float:
    if not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    if not (found.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    size = max(expected.abs().max().item(), least)
    difference = (found - expected).abs().max().item()
    return difference / size if difference else 0.0


@contextmanager
def _captured() -> Iterator[Output]:
    output = Output()
    logger = logging.getLogger("statsd_bn.client")
    handler = logging.Handler()
    handler.emit = output.lines.append
    level = logger.level
    logger.setLevel(logging.INFO)  # unlike an assignment, this clears the logger's cache
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield output
        output.warned += [str(one.message) for one in caught if "convert_model" in str(one.message)]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _log_faults(output: Output) -> Iterator[str]:
    """Faults of a conversion's log, which should be one short line at level INFO."""
    lines = [record.getMessage() for record in output.lines if record.levelno == logging.INFO]
    if [line.split()[0] for line in lines] != ["synchronised"]:
        yield f"expected one line at level INFO, got {lines}"
    yield from (f"line too long: {line}" for line in (*lines, *output.warned) if len(line) > LONGEST_LINE)
    yield from (record.getMessage() for record in output.lines if record.levelno > logging.INFO)
