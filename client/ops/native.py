"""The backend of the native core, for what is on a CPU; `client.native` has the core itself."""

import ctypes
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from client.native import library
from client.native.library import BF16, DONE, F16, F32, F64, Slice
from client.native.row import Pass
from client.ops.statistics import ChannelMoments, ChannelStatistics
from client.ops.vectors import alike, dense

CODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}

# Up to so many values the core takes less time than to release Python's global lock and to take it again.
SMALL = 2**15

core = library.library()

_TORCHS = frozenset({Tensor, torch.nn.Parameter})


def takes(tensor: Tensor) -> bool:
    """Whether the core computes with a tensor: with plain values in this process's memory, of a type that it knows."""
    return (
        type(tensor) in _TORCHS  # of a subclass, such as a fake tensor, nobody knows what its address means
        and tensor.is_cpu
        and tensor.dtype in CODES
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


class Native:
    """The backend for a CPU, without masks."""

    def takes(self, x: Tensor) -> bool:
        """Takes all types of floating point that torch computes batch norm in."""
        return takes(x)

    def moments(self, x: Tensor) -> ChannelMoments:
        """Adds in float64 from the first value on."""
        x = ready(x)
        channels = x.shape[1]
        row = torch.empty(2 * channels + 1, dtype=torch.float64, device="cpu")
        _call("sbn_moments", x, x.data_ptr(), row.data_ptr())
        sums, squares = row[:-1].view(2, channels)
        return ChannelMoments(x.numel() // channels, sums, squares, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Computes in float64, and rounds once."""
        x = ready(x)
        output = output_for(x)
        kept = _kept(statistics, statistics.slope, x)
        weight, bias = _ready_parameter(weight), _ready_parameter(bias)
        _call(
            "sbn_normalize", x, x.data_ptr(), output.data_ptr(), kept.data_ptr(), *parameter(weight), *parameter(bias)
        )
        return output

    def for_backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both alike."""
        return _alike(grad, x)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Adds in float64."""
        grad, x = _alike(grad, x)
        kept = _kept(statistics, statistics.slope, x)
        row = torch.empty(2 * x.shape[1] + 1, dtype=torch.float64, device="cpu")
        _call("sbn_backward_sums", x, grad.data_ptr(), x.data_ptr(), kept.data_ptr(), row.data_ptr())
        return row[:-1].view(2, -1)

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Computes in float64, and rounds once."""
        grad, x = _alike(grad, x)
        found = output_for(x)
        kept = _kept(statistics, torch.ones_like(statistics.slope), x)  # the means have the slope in them
        total = torch.cat((means.flatten(), means.new_ones(1)))
        weight = _ready_parameter(weight)
        _call(
            "sbn_input_grad", x, grad.data_ptr(), x.data_ptr(), found.data_ptr(), kept.data_ptr(), total.data_ptr(),
            *parameter(weight),
        )  # fmt: skip
        return found


def ready(x: Tensor) -> Tensor:
    """Returns `x` dense.

    Raises:
        RuntimeError: it has no values in memory, as where a mode makes fake tensors.
    """
    x = dense(x)
    if not takes(x) or not x.data_ptr():
        refuse(x)
    return x


def output_for(x: Tensor) -> Tensor:
    """Returns a tensor like `x` to be written; errors as for `ready`."""
    output = torch.empty_like(x)
    if type(output) is not Tensor:
        refuse(output)
    return output


def refuse(tensor: Tensor) -> int:
    """Raises RuntimeError, because a tensor has no values in memory; for want of its address."""
    raise RuntimeError(f"expected a tensor with values in memory, got {type(tensor).__name__} on {tensor.device}")


def _alike(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    x = ready(x)
    if grad.shape != x.shape:
        raise RuntimeError(f"expected a gradient of shape {tuple(x.shape)}, got {tuple(grad.shape)}")
    grad, x = alike(grad, x)
    return (grad if takes(grad) else output_for(x).copy_(grad)), x


def _kept(statistics: ChannelStatistics, slope: Tensor, x: Tensor) -> Tensor:
    """Returns what the core keeps of a forward pass, shape (3, C)."""
    if statistics.mean.shape != x.shape[1:2]:
        raise RuntimeError(f"expected an input of {len(statistics.mean)} channels, as before, got {x.shape[1]}")
    return torch.stack((statistics.mean, statistics.invstd, slope))


def _call(name: str, x: Tensor, *arguments: Any) -> None:
    plan = slice_of(x)
    if getattr(plan.core, name)(plan.address, *arguments) != DONE:
        raise MemoryError("the native core got no memory for vectors of one value per channel")


def parameter(values: Tensor | None) -> tuple[int | None, int]:
    """Returns address and type of a dense weight, bias or the like, as the core takes them."""
    return (None, F32) if values is None else (values.data_ptr() or refuse(values), CODES[values.dtype])


def takes_parameter(values: Tensor | None) -> bool:
    """Whether the core takes a weight or bias as it lies."""
    return values is None or (
        type(values) in _TORCHS
        and values.is_cpu
        and values.dtype in CODES
        and values.layout is torch.strided
        and values.is_contiguous()
        and not values.is_neg()
    )


def _ready_parameter(values: Tensor | None) -> Tensor | None:
    if values is None or takes_parameter(values):
        return values
    if not values.is_cpu:
        raise RuntimeError(f"expected weight and bias on the device of the input, cpu, got {values.device}")
    dtype = values.dtype if values.dtype in CODES else torch.float32
    return torch.empty(values.shape, dtype=dtype, device="cpu").copy_(values.detach())


def slice_of(x: Tensor) -> "Plan":
    """Returns the description of a dense `x`, shape (N, C, *); it has to live as long as its address is in use."""
    return plan_of(x.shape, x.dtype, x.is_contiguous(), torch.get_num_threads())


class Plan(library.Plan):
    """A plan that knows where it is, and what follows from it.

    Attributes:
        address: as functions of the core take it, for that of its slice too.
        channels: C.
        count: values per channel.
        core: the functions of the core for such slices: those of large ones release Python's global lock.
        forward: the forward pass; behind its rows are mean, inverse deviation and slope.
        backward: the backward pass.
    """

    address: int
    channels: int
    count: int
    core: Any
    forward: Pass
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
    """Returns the plan of calls with a dense input of this shape and type.

    Weight, bias or its gradient, and running statistics have these types, as far as there are any. `momentum` is as in
    `Running`; eps and eps_mode are the layer's.
    """
    samples, channels, *positions = shape
    length = prod(positions)
    is_rows = length == 1 or not is_contiguous
    sizes = (samples * length, channels, 1) if is_rows else (samples, channels, length)
    slice_ = Slice(*sizes, CODES[dtype], is_rows, threads)
    codes = (F32 if each is None else CODES[each] for each in (weight, bias, running))
    found = Plan(slice_, *codes, eps_mode == "clamp", eps, momentum)
    found.address, found.channels, found.count = ctypes.addressof(found), channels, samples * length
    assert core is not None  # noqa: S101 - `takes` is asked before
    of, others = core.holding if found.count * channels <= SMALL else core.releasing, core.releasing
    found.core = of
    found.forward = Pass(ctypes.c_double * (7 * channels + 2), of.sbn_forward, others.sbn_forward)
    found.backward = Pass(ctypes.c_double * (4 * channels + 2), of.sbn_backward, others.sbn_backward)
    return found
