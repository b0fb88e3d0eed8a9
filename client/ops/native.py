"""The backend for CPUs, by the native core that `client.native` loads: single steps and plain calls."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from client.native import library
from client.native.library import BF16, EXCHANGE, F16, F32, F64, FINISH, MEASURE, NativeRow, Pass, Plan
from client.ops import non_finite
from client.ops.device_errors import too_few_values
from client.ops.exchange import PlainExchange
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running, compute_type, dense, is_dense, same_layout
from statsd_bn.round_key import BACKWARD, RoundKey

CODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}

# For up to this number of values the core takes less time than the release of the GIL would.
SMALL = 2**15

core = library.library()

_NO_BUFFERS = Running()

_STRIDED = torch.strided
_TORCHS = frozenset({Tensor, torch.nn.Parameter})


def supports(*tensors: Tensor) -> bool:
    """Whether the core can compute with tensors: plain values of a supported type in this process's memory."""
    for tensor in tensors:
        # The address of a subclass, such as a fake tensor, may not point to its values.
        if type(tensor) not in _TORCHS or not tensor.is_cpu or tensor.dtype not in CODES:
            return False
        if tensor.layout is not _STRIDED or tensor.is_neg():
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
        row = torch.empty(2 * x.shape[1] + 1, dtype=torch.float64, device="cpu")
        _run("forward", MEASURE, x, row, None, x, *(None,) * 6)
        return ChannelMoments(x.numel() // x.shape[1], row[:-1].view(2, -1), tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Compute in float64 and round once."""
        x = ready(x)
        output = output_for(x)
        weight, bias = _ready_parameter(weight), _ready_parameter(bias)
        tensors = None, _saved(statistics, x), x, output, weight, bias, None, None, None
        _run("forward", FINISH, x, *tensors, parameters=(weight, bias))
        return output

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Add in float64."""
        grad, x = _alike(grad, x)
        row = torch.empty(2 * x.shape[1] + 1, dtype=torch.float64, device="cpu")
        _run("backward", MEASURE, x, row, _saved(statistics, x), grad, x, *(None,) * 4)
        return row[:-1].view(2, -1)

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Compute in float64 and round once."""
        grad, x = _alike(grad, x)
        gradient, weight = output_for(x), _ready_parameter(weight)
        # `means` include slope and count already: the core applies the slope (0 or 1) again and divides by count 1.
        total = means.flatten(), means.new_ones(1)
        rows = torch.cat((*total, *total))
        tensors = rows, _saved(statistics, x), grad, x, gradient, weight, None, None
        _run("backward", FINISH, x, *tensors, parameters=(weight,))
        return gradient


def ready(x: Tensor) -> Tensor:
    """Return `x` dense; raise RuntimeError if it has no values in memory, such as a fake tensor."""
    x = dense(x)
    if not supports(x) or not x.data_ptr():
        _refuse(x)
    return x


def output_for(x: Tensor) -> Tensor:
    """Uninitialised tensor like `x`; errors as for `ready`."""
    output = torch.empty_like(x)
    if type(output) is not Tensor:
        _refuse(output)
    return output


def address_of(tensor: Tensor | None) -> int | None:
    """Address of a tensor's values; None for None. Raises RuntimeError if they are not in memory."""
    return None if tensor is None else tensor.data_ptr() or _refuse(tensor)


def _refuse(tensor: Tensor) -> int:
    raise RuntimeError(f"expected a tensor with values in memory, got {type(tensor).__name__} on {tensor.device}")


def _alike(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    x = ready(x)
    if grad.shape != x.shape:
        raise RuntimeError(f"expected a gradient of shape {tuple(x.shape)}, got {tuple(grad.shape)}")
    grad, x = same_layout(grad, x)
    return (grad if supports(grad) else output_for(x).copy_(grad)), x


def _saved(statistics: ChannelStatistics, x: Tensor) -> Tensor:
    """Mean, invstd and slope as the core stores them, shape (3, C)."""
    channels = statistics.vectors.shape[1]
    if channels != x.shape[1]:
        raise RuntimeError(f"expected an input of {channels} channels, as in the forward pass, got {x.shape[1]}")
    return statistics.vectors.contiguous()


def _run(name: str, stage: int, x: Tensor, *tensors: Tensor | None, parameters: Sequence[Tensor | None] = ()) -> None:
    """Run a stage of the pass of this name for a dense slice, with the tensors that the core's function takes."""
    types = (None if each is None else each.dtype for each in parameters)
    plan = plan_of(x.shape, x.dtype, x.is_contiguous(), torch.get_num_threads(), *types)
    NativeRow(plan, getattr(plan, name), None, *map(address_of, tensors)).run(stage)


def supports_parameters(channels: tuple[int, ...], *parameters: Tensor | None) -> bool:
    """Whether all weights and biases have the shape `channels`, and the core can read them without a copy."""
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


@lru_cache(maxsize=4096)
def plan_of(
    shape: tuple[int, ...], dtype: torch.dtype, is_contiguous: bool, threads: int,
    weight: torch.dtype | None = None, bias: torch.dtype | None = None, running: torch.dtype | None = None,
    momentum: float = 0.0, eps: float = 0.0, eps_mode: str = "plus",
) -> Plan:  # fmt: skip
    """Plan of calls with dense inputs of this type and shape, (N, C, *).

    `is_contiguous`: else channels_last. `threads`: the maximum. `weight`, `bias` (or its gradient), `running`: their
    types, or None. `momentum`: as in `Running`.
    """
    samples, channels, *positions = shape
    length = prod(positions)
    is_rows = length == 1 or not is_contiguous
    sizes = (samples * length, channels, 1) if is_rows else (samples, channels, length)
    codes = (F32 if each is None else CODES[each] for each in (weight, bias, running))
    plan = Plan(*sizes, CODES[dtype], is_rows, threads, *codes, eps_mode == "clamp", eps, momentum)
    plan.at, plan.count, plan.saved_offset = ctypes.addressof(plan), samples * length, 8 * (4 * channels + 2)
    assert core is not None  # noqa: S101 - `supports` is checked before
    alone, together = core.holding if plan.count * channels <= SMALL else core.releasing, core.releasing
    plan.forward = Pass(ctypes.c_double * (7 * channels + 2), alone.sbn_forward, together.sbn_forward)
    plan.backward = Pass(ctypes.c_double * (4 * channels + 2), alone.sbn_backward, together.sbn_backward)
    return plan


def supports_call(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the core can compute a call with one slice, no mask, and rows on the host."""
    return (
        core is not None
        and supports(x)
        and x.numel() > 0
        and supports_parameters(x.shape[1:2], weight, bias)
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
        and not (x.is_inference() and torch.is_grad_enabled())  # autograd would raise, but only after the round
    )


@dataclass(slots=True, eq=False)
class NativeExchange(PlainExchange):
    """A plain call on a CPU, by the native core."""

    buffer: Any = field(init=False)  # of the forward pass: own row, sum of all rows, then mean, invstd and slope
    plan: Plan = field(init=False)  # of the forward pass
    shape: tuple[int, ...] = field(init=False)  # of the input

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Compute the output, and in the first run of a call run the forward round."""
        is_first = self.key is None  # False in a checkpoint's second run, which must call the same torch operators
        if not x.is_contiguous() or not is_first:
            x = dense(x) if is_first else ready(x)
        output, shape = output_for(x), x.shape
        mean, var, tracked, momentum = self.running or _NO_BUFFERS
        plan = plan_of(
            shape, x.dtype, x.is_contiguous(), torch.get_num_threads(),
            None if weight is None else weight.dtype, None if bias is None else bias.dtype,
            None if mean is None else mean.dtype, momentum, float(self.eps), self.eps_mode,
        )  # fmt: skip
        buffer = plan.forward.new_buffer() if is_first else self.buffer
        buffer_at = ctypes.addressof(buffer)
        row = NativeRow(
            plan, plan.forward, buffer, buffer_at, buffer_at + plan.saved_offset,
            address_of(x), output.data_ptr(), address_of(weight), address_of(bias),
            address_of(mean), address_of(var), address_of(tracked),
        )  # fmt: skip
        if not is_first:
            row.run(FINISH)
            return output
        self.plan, self.shape, self.buffer = plan, shape, buffer
        key = self._round(row, None)
        if plan.count <= 1 and self._count == 1:
            raise too_few_values(self.layer, 1, tuple(x.shape))
        if tracked is not None:
            increment_version(tracked)  # of this buffer only, like torch's layer
        self.key, self.has_updated_running, self.running = key, self.running is not None, None
        return output

    def _round(self, row: NativeRow, key: RoundKey | None) -> RoundKey:
        """Run a pass's round, finish the pass, and return the round's key; `key` as for `Transport.run_slave`."""
        result = self.transport.run_row(row, key, self.phase)
        if isinstance(result, RoundKey):  # the core has finished the pass
            return result
        if not row.is_finished:
            if result.non_finite.runs:
                non_finite.check(self.transport, row.contribution, result)
            # The forward pass's count: a member lost since then sends no gradient, but is part of the statistics.
            row.finish(result.values, result.count if key is None else self._count)
        return result.key

    @property
    def _count(self) -> int:
        """Count of the whole batch."""
        return int(self.buffer[4 * self.plan.channels + 1])

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...] | None:
        """Compute the gradients, and run the backward round if the input needs a gradient."""
        shape = x.shape
        if not (shape == self.shape == grad.shape and supports(grad, x) and supports_parameters(shape[1:2], weight)):
            return None
        if grad.dtype != x.dtype or grad.stride() != x.stride() or not is_dense(x):
            grad, x = same_layout(grad, x)
        needs_input, needs_weight, needs_bias = needs
        bias = compute_type(x)
        of = None if weight is None else weight.dtype
        plan = plan_of(shape, x.dtype, x.is_contiguous(), torch.get_num_threads(), of, bias)
        of_input = output_for(x) if needs_input else None
        of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
        of_bias = None
        if needs_bias and weight is not None and of == bias:
            of_bias = torch.empty_like(weight)  # faster than `new_empty`
        elif needs_bias:
            of_bias = x.new_empty(plan.channels, dtype=bias)
        buffer = plan.backward.new_buffer()
        row = NativeRow(
            plan, plan.backward, buffer, ctypes.addressof(buffer),
            ctypes.addressof(self.buffer) + plan.saved_offset, grad.data_ptr(), x.data_ptr(),
            address_of(of_input), address_of(weight), address_of(of_weight), address_of(of_bias),
        )  # fmt: skip
        if needs_input:
            self._round(row, self.next_key(BACKWARD))
        else:  # without a group the core runs no round; the parameters' gradients are of this slice alone, as under DDP
            row.run(EXCHANGE)
        return of_input, of_weight, of_bias

    def lazy_attribute(self, name: str) -> Any:
        """Views of the buffer: moments, local and of the whole batch, and statistics."""
        if name not in {"local", "moments", "statistics"}:
            return None
        size, values = 2 * self.plan.channels, torch.from_numpy(np.frombuffer(self.buffer))
        if name == "local":
            return [ChannelMoments(self.plan.count, values[:size].view(2, -1), tuple(self.shape))]
        if name == "moments":
            return ChannelMoments(self._count, values[size + 1 : 2 * size + 1].view(2, -1))
        return ChannelStatistics(self._count, values[2 * size + 2 :].view(3, -1))
