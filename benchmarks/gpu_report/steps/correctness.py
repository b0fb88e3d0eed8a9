"""Whether output, gradients and running statistics equal a float64 reference for all shapes, types and layouts.

Rows stay on the device: over a process group of one rank, and between virtual replicas, one of which has no samples.
Each case runs twice, and has to give the same bits. `gpu_report.reference` computes the bounds of the errors.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import client
from gpu_report import reference
from gpu_report.reference import TooFar
from gpu_report.step import Step
from gpu_report.variants import rounds_on_device
from gpu_report.worlds import Replicas, world_of_one

Run = Callable[["Case"], dict[str, Tensor]]

TYPES = (torch.float32, torch.bfloat16, torch.float16)

# Mean divided by standard deviation. Half precision cannot hold values that differ by 1 around 10,000, so rounding
# leaves few different values of the input there, or a single one.
RATIOS = (0, 16, 10_000)

CHANNELS = 24
POSITIONS: dict[str, tuple[int, ...]] = {
    "2-D": (),
    "3-D": (51,),
    "4-D": (14, 15),
    "4-D, channels_last": (14, 15),
    "5-D": (4, 7, 9),
    "5-D, channels_last_3d": (4, 7, 9),
}
SAMPLES = 64
SAMPLES_STAND_IN = 5
LAYERS = {
    2: client.SynchronizedBatchNorm1d,
    3: client.SynchronizedBatchNorm1d,
    4: client.SynchronizedBatchNorm2d,
    5: client.SynchronizedBatchNorm3d,
}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# The first replica's share of the batch; the second replica has no samples.
SHARE = 0.6

# The share of positions that a mask keeps.
MASKED_SHARE = 0.7

# Forward and backward.
ROUNDS_OF_A_CALL = 2

# More elements than a signed index of 32 bits counts.
LARGE = (33, 64, 1024, 1024)
LARGE_STAND_IN = (3, 4, 32, 32)

# Memory of the large case: input, output gradient, two outputs, two input gradients, and kernels' temporary memory.
BYTES_PER_ELEMENT = 2 * 6 + 4 * 5


@dataclass(frozen=True, eq=False)
class Case:
    """One call of a layer.

    Attributes:
        x: the whole batch.
        grad: of the output.
        affine: whether the layer has weight and bias.
        mask: which positions count, or None.
    """

    x: Tensor
    grad: Tensor
    affine: bool = True
    mask: Tensor | None = None

    def layer(self, process_group: object = None) -> nn.Module:
        """Returns a fresh layer; weight and bias are the same each time."""
        layer: nn.Module = LAYERS[self.x.dim()](self.x.shape[1], affine=self.affine, process_group=process_group)
        layer.layer_name = "bn"
        if self.affine:
            with torch.no_grad():
                layer.weight.copy_(torch.linspace(-1.5, 2.0, self.x.shape[1]))
                layer.bias.copy_(torch.linspace(1.0, -1.0, self.x.shape[1]))
        return layer.to(self.x.device)


def run(step: Step) -> None:
    """Runs all cases over a process group and in replicas, and the large case over the process group only."""
    torch.manual_seed(0)
    with world_of_one(step.device) as group:
        _all_cases(step, "world of one", lambda case: _by_itself(case, case.layer(group)))
        _empty_batch(step, group)
        if _has_room(step):
            with step.attempt("world of one: more than 2^31 elements: results are within the bounds, with equal bits"):
                _large(step, group)
        _all_cases(step, "replicas", _by_replicas)


def _all_cases(step: Step, way: str, run: Run) -> None:
    for name in POSITIONS:
        _checked(step, way, name, run, _usual_cases(step, name))
    for name, make in SPECIAL.items():
        _checked(step, way, name, run, ((_name_of(dtype), make(step, dtype)) for dtype in TYPES))


def _checked(step: Step, way: str, what: str, run: Run, cases: Iterator[tuple[str, Case]]) -> None:
    """Runs each case twice, and records each check once for all cases; the figures are the largest errors."""
    worst: dict[torch.dtype, float] = {}
    failures, others, nr_calls = [], [], 0
    with rounds_on_device() as rounds:
        for name, case in cases:
            nr_calls += 2
            try:
                first, second = run(case), run(case)
                shares = reference.distances(first, _expected(case))
            except Exception as error:  # noqa: BLE001 - an exception is a result of the case
                failures.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if not reference.has_equal_bits(first, second):
                others.append(name)
            worst[case.x.dtype] = max(worst.get(case.x.dtype, 0.0), *shares.values())
    step.check(f"{way}: {what}: results are within the bounds of the reference", not failures, "\n".join(failures))
    step.check(f"{way}: {what}: a second run gives the same bits", not others, "; ".join(others))
    if not failures:
        expected, found = ROUNDS_OF_A_CALL * nr_calls, rounds.number
        step.check(f"{way}: {what}: all rows stay on the device", found == expected, f"{found} of {expected} rounds")
    for dtype, share in worst.items():
        step.figure(f"largest error, {_name_of(dtype)}", share, "of its bound", way=way, input=what)


def _expected(case: Case) -> dict[str, reference.Expected]:
    """Returns the reference, computed on the host, which shares no kernel with the device."""
    layer = case.layer().cpu()
    x, grad, mask = (None if each is None else each.cpu() for each in (case.x, case.grad, case.mask))
    return reference.expected(x, grad, layer.weight, layer.bias, mask)


def _by_itself(case: Case, layer: nn.Module) -> dict[str, Tensor]:
    return _results(case, layer, layer)


def _by_replicas(case: Case) -> dict[str, Tensor]:
    layer = case.layer()
    nr_samples = len(case.x)
    first = math.ceil(SHARE * nr_samples)
    return _results(case, layer, Replicas(layer, case.x.device, (first, 0, nr_samples - first)))


def _results(case: Case, layer: nn.Module, called: nn.Module) -> dict[str, Tensor]:
    x = case.x.detach().requires_grad_()
    output = called(x) if case.mask is None else called(x, case.mask)
    output.backward(case.grad)
    found = {"output": output.detach(), "input gradient": x.grad}
    found |= {f"{name} gradient": each.grad for name, each in layer.named_parameters()}
    return found | {"running mean": layer.running_mean, "running variance": layer.running_var}


def _usual_cases(step: Step, name: str) -> Iterator[tuple[str, Case]]:
    for dtype in TYPES:
        for ratio in RATIOS:
            yield f"{_name_of(dtype)}, mean/std {ratio}", _usual(step, name, dtype, ratio)


def _usual(step: Step, name: str, dtype: torch.dtype, ratio: float = 1) -> Case:
    x, grad = _input(step, name, dtype, ratio), _random(step, _shape(step, name), dtype)
    if "channels_last" in name:
        x, grad = (each.to(memory_format=FORMATS[each.dim()]) for each in (x, grad))
    return Case(x, grad)


def _input(step: Step, name: str, dtype: torch.dtype, ratio: float = 1) -> Tensor:
    """Returns an input of this mean/std; the standard deviations of the channels differ."""
    shape = _shape(step, name)
    spread = torch.linspace(0.5, 2.0, CHANNELS, device=step.device).view(1, -1, *[1] * (len(shape) - 2))
    return ((torch.randn(shape, device=step.device) + ratio) * spread).to(dtype)


def _shape(step: Step, name: str) -> tuple[int, ...]:
    return step.pick(SAMPLES, SAMPLES_STAND_IN), CHANNELS, *POSITIONS[name]


def _random(step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=step.device).to(dtype)


def _expanded(step: Step, dtype: torch.dtype) -> Case:
    x = _input(step, "4-D", dtype)
    return Case(x, _random(step, (1, CHANNELS, 1, x.shape[3]), dtype).expand_as(x))


def _permuted(step: Step, dtype: torch.dtype) -> Case:
    x = _input(step, "4-D", dtype)
    return Case(x, _random(step, x.shape[::-1], dtype).permute(3, 2, 1, 0))


def _of_other_layout(step: Step, dtype: torch.dtype) -> Case:
    case = _usual(step, "4-D, channels_last", dtype)
    return Case(case.x, case.grad.contiguous())


def _with_gaps(step: Step, dtype: torch.dtype) -> Case:
    """The input is every other column of a larger one."""
    x = _input(step, "4-D", dtype)
    return Case(x.repeat_interleave(2, 3)[..., ::2], _random(step, x.shape, dtype))


def _without_parameters(step: Step, dtype: torch.dtype) -> Case:
    return Case(_input(step, "4-D", dtype), _random(step, _shape(step, "4-D"), dtype), affine=False)


def _masked(step: Step, dtype: torch.dtype) -> Case:
    x = _input(step, "3-D", dtype)
    mask = torch.rand(len(x), x.shape[2], device=step.device) < MASKED_SHARE
    return Case(x, _random(step, x.shape, dtype), mask=mask)


SPECIAL: dict[str, Callable[[Step, torch.dtype], Case]] = {
    "expanded gradient": _expanded,
    "permuted gradient": _permuted,
    "gradient of another layout": _of_other_layout,
    "input with gaps": _with_gaps,
    "no weight and bias": _without_parameters,
    "mask": _masked,
}


def _empty_batch(step: Step, group: object) -> None:
    """Checks a single rank without samples."""
    with step.attempt("world of one: an empty batch gives empty results, and moves no running statistics"):
        for dtype in TYPES:
            x = torch.empty(0, CHANNELS, 14, 15, dtype=dtype, device=step.device)
            case = Case(x, torch.empty_like(x))
            layer = case.layer(group)
            found = _by_itself(case, layer)
            zeros = torch.zeros(CHANNELS, device=step.device)
            wanted = {"output": x, "input gradient": x, "weight gradient": zeros, "bias gradient": zeros}
            wanted |= {"running mean": zeros, "running variance": zeros + 1}
            if not reference.has_equal_bits(found, wanted) or int(layer.num_batches_tracked) != 1:
                raise TooFar(f"{_name_of(dtype)}: expected {wanted}, got {found}")


def _has_room(step: Step) -> bool:
    """Whether the device has memory for the large input; else a note says so."""
    if step.stand_in:
        step.note(f"the stand-in for an input of more than 2^31 elements has {math.prod(LARGE_STAND_IN)}")
        return True
    needed, free = BYTES_PER_ELEMENT * math.prod(LARGE), torch.cuda.mem_get_info(step.device)[0]
    if free < needed:
        step.note(f"no input of more than 2^31 elements: expected {needed >> 30} GiB of free memory, got {free >> 30}")
    return free >= needed


def _large(step: Step, group: object) -> None:
    shape = step.pick(LARGE, LARGE_STAND_IN)
    case = Case(*(torch.randn(shape, dtype=torch.bfloat16, device=step.device) for _ in range(2)))
    layers = [case.layer(group) for _ in range(2)]
    first, second = (_by_itself(case, layer) for layer in layers)
    worst = 0.0
    for channel in range(shape[1]):  # one by one, since the whole would not fit in float64
        own = slice(channel, channel + 1)
        part = Case(case.x[:, own], case.grad[:, own])
        of_layer = (each[own] for each in (layers[0].weight, layers[0].bias))
        expected = reference.expected(part.x, part.grad, *of_layer)
        found = {name: each[own] if each.dim() == 1 else each[:, own] for name, each in first.items()}
        worst = max(worst, *reference.distances(found, expected).values())
    step.figure("largest error", worst, "of its bound", way="world of one", input=f"bfloat16, {shape}")
    if not all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first):
        raise TooFar("expected the second run to give the same bits")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
