"""The plain call: a backend computes one slice without a mask, in one step forward and one step backward.

`NativeExchange` computes on a CPU, `client.ops.triton` on CUDA. Replicas, masks and second derivatives use
`client.ops.functional`, for which a plain call creates tensors lazily, from its buffers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from client.native.library import EXCHANGE, FINISH
from client.native.row import NativeRow
from client.ops import native, non_finite
from client.ops.device_errors import too_few_values
from client.ops.exchange import Exchange
from client.ops.functional import Exchanging, Slice, backward_by_operators
from client.ops.native import Plan, output_for, plan_of, ready, refuse, supports, supports_parameters
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running, compute_type, dense, is_dense, same_layout
from client.tracebacks import hide_internal_frames
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import BACKWARD, RoundKey

_NO_BUFFERS = Running()


def is_plain(slice_: Slice) -> bool:
    """Whether a slice has no mask, stream or saver, and parameters of C values: kernels do not check lengths."""
    x, weight, bias, mask, saver, stream = slice_
    channels = x.shape[1:2]
    return (
        mask is None
        and saver is None
        and stream is None
        and (weight is None or weight.shape == channels)
        and (bias is None or bias.shape == channels)
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
    )


@dataclass(slots=True, eq=False)
class PlainExchange(Exchange):
    """A plain call, see `Exchange`."""

    running: Running | None = None  # to update in the forward pass; None where the layer updates them

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the output; run the forward round first if it has not run yet."""
        raise NotImplementedError

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...] | None:
        """Gradients of input, weight and bias; None if the backend does not support the saved tensors."""
        raise NotImplementedError

    def lazy_attribute(self, name: str) -> Any:
        """Attribute of `Exchange` that few calls need; None for any other name."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        value = self.lazy_attribute(name)
        if value is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, value)
        return value


class _BatchNorm(Exchanging):
    @staticmethod
    def forward(ctx: Any, exchange: PlainExchange, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(x, weight)
        return exchange.normalise(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        exchange: PlainExchange = ctx.exchange
        _, *needs = ctx.needs_input_grad
        try:
            gradients = None if torch.is_grad_enabled() else exchange.gradients(grad, x, weight, needs)
            return None, *(gradients or backward_by_operators(exchange, needs, grad, x, weight))
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise


# (exchange, input, weight, bias) -> output; see `functional.apply_function`.
batch_norm: Any = super(torch.autograd.Function, _BatchNorm).apply  # defined in C


def native_supports(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the core can compute a call with one slice and no mask; the row travels over the host."""
    return (
        native.core is not None
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
        """Compute the output, with the forward round in one call of the core."""
        is_first = self.key is None
        if not is_first:
            x = ready(x)
        elif not x.is_contiguous():
            x = dense(x)
        output, shape = output_for(x), x.shape
        mean, var, tracked, momentum = self.running or _NO_BUFFERS
        plan = plan_of(
            shape, x.dtype, x.is_contiguous(), torch.get_num_threads(),
            None if weight is None else weight.dtype, None if bias is None else bias.dtype,
            None if mean is None else mean.dtype, momentum, float(self.eps), self.eps_mode,
        )  # fmt: skip
        buffer = plan.forward.new_buffer() if is_first else self.buffer
        row = NativeRow(
            plan.forward, buffer, plan.address, buffer,
            x.data_ptr() or refuse(x), output.data_ptr(),
            None if weight is None else weight.data_ptr() or refuse(weight),
            None if bias is None else bias.data_ptr() or refuse(bias),
            None if mean is None else mean.data_ptr() or refuse(mean),
            None if var is None else var.data_ptr() or refuse(var),
            None if tracked is None else tracked.data_ptr() or refuse(tracked),
        )  # fmt: skip
        if not is_first:
            row.run(FINISH)
            return output
        self.plan, self.shape, self.buffer = plan, shape, buffer
        key = self._round(row, None)
        if plan.count <= 1 and self._count == 1:
            raise too_few_values(self.layer, 1, tuple(x.shape))
        if tracked is not None:
            increment_version(tracked)  # of this buffer only, as torch's layer
        self.key, self.has_updated_running, self.running = key, self.running is not None, None
        return output

    def _round(self, row: NativeRow, key: RoundKey | None) -> RoundKey:
        """Run the round of a pass and finish the pass; `key` as for `Transport.run_slave`; return the round's key."""
        result = self.transport.run_row(row, key, self.phase)
        if isinstance(result, Aggregate) and not row.is_finished:
            if result.non_finite.runs:
                non_finite.check(self.transport, row.contribution, result)
            # The count stays forward's: a member lost since then sends no gradient, but is part of the statistics.
            row.finish(result.values, result.count if key is None else self._count)
        return result.key

    @property
    def _count(self) -> int:
        """Count of the whole batch."""
        return int(self.buffer[4 * self.plan.channels + 1])

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...] | None:
        """Compute the gradients, with the backward round in one call of the core."""
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
            of_bias = torch.empty_like(weight)  # faster than the other
        elif needs_bias:
            of_bias = x.new_empty(plan.channels, dtype=bias)
        buffer = plan.backward.new_buffer()
        row = NativeRow(
            plan.backward, buffer, plan.address, buffer,
            ctypes.addressof(self.buffer) + 8 * (4 * plan.channels + 2), grad.data_ptr(), x.data_ptr(),
            None if of_input is None else of_input.data_ptr(),
            None if weight is None else weight.data_ptr() or refuse(weight),
            None if of_weight is None else of_weight.data_ptr(), None if of_bias is None else of_bias.data_ptr(),
        )  # fmt: skip
        if needs_input:
            self._round(row, self.next_key(BACKWARD))
        else:  # parameters keep their local sums, as under DDP
            row.run(EXCHANGE)
        return of_input, of_weight, of_bias

    def lazy_attribute(self, name: str) -> Any:
        """Views of the buffer: moments, local and of the whole batch, and statistics."""
        if name not in {"local", "moments", "statistics"}:
            return None
        channels, values = self.plan.channels, torch.from_numpy(np.frombuffer(self.buffer))
        if name == "local":
            sums, squares = values[: 2 * channels].view(2, -1)
            return [ChannelMoments(self.plan.count, sums, squares, tuple(self.shape))]
        if name == "moments":
            return ChannelMoments(self._count, *values[2 * channels + 1 : 4 * channels + 1].view(2, -1))
        return ChannelStatistics(self._count, *values[4 * channels + 2 :].view(3, -1))
