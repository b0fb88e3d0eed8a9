"""The backend for CPUs, computed by the native core; `client.native` loads the core itself."""

import ctypes
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from client.native import library
from client.native.library import BF16, DONE, F16, F32, F64, PlanStruct, SliceStruct
from client.native.row import Pass
from client.ops.statistics import ChannelMoments, ChannelStatistics, dense, same_layout

CODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}

# Up to this number of values the core takes less time than releasing and acquiring the GIL.
SMALL = 2**15

core = library.library()

_STRIDED = torch.strided
_TORCHS = frozenset({Tensor, torch.nn.Parameter})


def supports(*tensors: Tensor) -> bool:
    """Whether the core can compute with tensors: plain values of a supported type in this process's memory."""
    for tensor in tensors:
        if not (
            type(tensor) in _TORCHS  # the address of a subclass, such as a fake tensor, may not point to its values
            and tensor.is_cpu
            and tensor.dtype in CODES
            and tensor.layout is _STRIDED
            and not tensor.is_neg()
        ):
            return False
    return True


class Native:
    """The backend for a CPU, without masks."""

    def supports(self, x: Tensor) -> bool:
        """Support all floating-point types of torch's batch norm."""
        return supports(x)

    def moments(self, x: Tensor) -> ChannelMoments:
        """Add in float64 from the first value on."""
        x = ready(x)
        channels = x.shape[1]
        row = torch.empty(2 * channels + 1, dtype=torch.float64, device="cpu")
        _call("sbn_moments", x, x.data_ptr(), row.data_ptr())
        sums, squares = row[:-1].view(2, channels)
        return ChannelMoments(x.numel() // channels, sums, squares, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Compute in float64 and round once."""
        x = ready(x)
        output = output_for(x)
        saved = _saved(statistics, statistics.slope, x)
        weight, bias = _ready_parameter(weight), _ready_parameter(bias)
        _call("sbn_normalize", x, x.data_ptr(), output.data_ptr(), saved.data_ptr(), *_pointer(weight), *_pointer(bias))
        return output

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Add in float64."""
        grad, x = _alike(grad, x)
        saved = _saved(statistics, statistics.slope, x)
        row = torch.empty(2 * x.shape[1] + 1, dtype=torch.float64, device="cpu")
        _call("sbn_backward_sums", x, grad.data_ptr(), x.data_ptr(), saved.data_ptr(), row.data_ptr())
        return row[:-1].view(2, -1)

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Compute in float64 and round once."""
        grad, x = _alike(grad, x)
        gradient = output_for(x)
        saved = _saved(statistics, torch.ones_like(statistics.slope), x)  # the means have the slope in them
        total = torch.cat((means.flatten(), means.new_ones(1)))
        weight = _ready_parameter(weight)
        _call(
            "sbn_input_grad", x, grad.data_ptr(), x.data_ptr(), gradient.data_ptr(), saved.data_ptr(), total.data_ptr(),
            *_pointer(weight),
        )  # fmt: skip
        return gradient


def ready(x: Tensor) -> Tensor:
    """`x` dense; RuntimeError if it has no values in memory, as a fake tensor."""
    x = dense(x)
    if not supports(x) or not x.data_ptr():
        refuse(x)
    return x


def output_for(x: Tensor) -> Tensor:
    """Uninitialised tensor like `x`; errors as for `ready`."""
    output = torch.empty_like(x)
    if type(output) is not Tensor:
        refuse(output)
    return output


def refuse(tensor: Tensor) -> int:
    """Raise RuntimeError for a tensor without values in memory; a stand-in for its address."""
    raise RuntimeError(f"expected a tensor with values in memory, got {type(tensor).__name__} on {tensor.device}")


def _alike(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    x = ready(x)
    if grad.shape != x.shape:
        raise RuntimeError(f"expected a gradient of shape {tuple(x.shape)}, got {tuple(grad.shape)}")
    grad, x = same_layout(grad, x)
    return (grad if supports(grad) else output_for(x).copy_(grad)), x


def _saved(statistics: ChannelStatistics, slope: Tensor, x: Tensor) -> Tensor:
    """Mean, invstd and slope as the core stores them, shape (3, C)."""
    if statistics.mean.shape != x.shape[1:2]:
        raise RuntimeError(
            f"expected an input of {len(statistics.mean)} channels, as in the forward pass, got {x.shape[1]}"
        )
    return torch.stack((statistics.mean, statistics.invstd, slope))


def _call(name: str, x: Tensor, *arguments: Any) -> None:
    plan = plan_of(x.shape, x.dtype, x.is_contiguous(), torch.get_num_threads())
    if getattr(plan.core, name)(plan.address, *arguments) != DONE:
        raise MemoryError("the native core could not allocate vectors of one value per channel")


def _pointer(values: Tensor | None) -> tuple[int | None, int]:
    """Address and type code of a dense parameter."""
    return (None, F32) if values is None else (values.data_ptr() or refuse(values), CODES[values.dtype])


def supports_parameters(channels: tuple[int, ...], *parameters: Tensor | None) -> bool:
    """Whether the core can read weights and biases without a copy, all of shape `channels`."""
    for values in parameters:
        if values is not None and not (values.shape == channels and supports(values) and values.is_contiguous()):
            return False
    return True


def _ready_parameter(values: Tensor | None) -> Tensor | None:
    if values is None or supports_parameters(values.shape, values):
        return values
    if not values.is_cpu:
        raise RuntimeError(f"expected weight and bias on the device of the input, cpu, got {values.device}")
    dtype = values.dtype if values.dtype in CODES else torch.float32
    return torch.empty(values.shape, dtype=dtype, device="cpu").copy_(values.detach())


class Plan(PlanStruct):
    """Constant part of the calls with inputs of one shape and type, and the functions of the core for them."""

    address: int  # of the plan, and of its slice, which comes first
    channels: int
    count: int  # values per channel
    core: Any  # releases the GIL for large slices
    forward: Pass  # its buffer holds the rows, then mean, invstd and slope
    backward: Pass


@lru_cache(maxsize=4096)
def plan_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_contiguous: bool,
    threads: int,
    weight: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    running: torch.dtype | None = None,
    momentum: float = 0.0,
    eps: float = 0.0,
    eps_mode: str = "plus",
) -> Plan:
    """Plan of calls with a dense input of this shape, (N, C, *), and type.

    `is_contiguous`: else channels_last. `threads`: the maximum. `weight`, `bias` (or its gradient), `running`: their
    types, or None. `momentum`: as in `Running`.
    """
    samples, channels, *positions = shape
    length = prod(positions)
    is_rows = length == 1 or not is_contiguous
    sizes = (samples * length, channels, 1) if is_rows else (samples, channels, length)
    slice_ = SliceStruct(*sizes, CODES[dtype], is_rows, threads)
    codes = (F32 if each is None else CODES[each] for each in (weight, bias, running))
    plan = Plan(slice_, *codes, eps_mode == "clamp", eps, momentum)
    plan.address, plan.channels, plan.count = ctypes.addressof(plan), channels, samples * length
    assert core is not None  # noqa: S101 - `supports` is checked before
    of, others = core.holding if plan.count * channels <= SMALL else core.releasing, core.releasing
    plan.core = of
    double, shared = ctypes.c_double, (plan.count, channels)
    plan.forward = Pass(double * (7 * channels + 2), of.sbn_forward, others.sbn_forward, *shared)
    plan.backward = Pass(double * (4 * channels + 2), of.sbn_backward, others.sbn_backward, *shared)
    return plan
