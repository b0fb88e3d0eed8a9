"""NativeExchange: the plain call on a CPU, computed by the native core."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.native.library import EXCHANGE, FINISH
from client.native.row import NativeRow
from client.ops import native, non_finite
from client.ops.device_errors import too_few_values
from client.ops.functional import Slice
from client.ops.native import Plan, output_for, plan_of, ready, refuse, supports, supports_parameter
from client.ops.plain import PlainExchange, is_plain
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running, compute_type, same_layout
from client.transports.transport import NativeResult
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import BACKWARD, RoundKey

_NOTHING = Running()


def serves(mine: Slice) -> bool:
    """Whether the core can compute a call with this slice; the row travels over the host."""
    x = mine.input
    return (
        native.core is not None
        and supports(x)
        and x.numel() > 0
        and is_plain(mine)
        and supports_parameter(mine.weight)
        and supports_parameter(mine.bias)
        and not (x.is_inference() and torch.is_grad_enabled())  # autograd would raise, but only after the round
    )


@dataclass(slots=True, eq=False)
class NativeExchange(PlainExchange):
    """One layer's call, see `PlainExchange`.

    Attributes:
        room: buffer of the forward pass: own row, sum of all rows, then mean, invstd and slope.
        plan: the plan of the forward pass.
        shape: of the input.
    """

    room: Any = field(init=False)
    plan: Plan = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output; runs the forward round first if it has not run yet."""
        is_first = self.key is None
        if not (is_first and x.is_contiguous()):
            x = ready(x)
        output, shape = output_for(x), x.shape
        mean, var, tracked, momentum = self.running or _NOTHING
        plan = plan_of(
            shape, x.dtype, x.is_contiguous(), torch.get_num_threads(),
            None if weight is None else weight.dtype, None if bias is None else bias.dtype,
            None if mean is None else mean.dtype, momentum, float(self.eps), self.eps_mode,
        )  # fmt: skip
        if is_first:
            self.plan, self.shape, self.room = plan, shape, plan.forward.room()
        row = NativeRow(
            plan.forward, self.room, plan.count, plan.channels, plan.address, self.room,
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
        key = self._round(row, self.transport.run_row(row, None, self.phase))
        if self.room[4 * plan.channels + 1] == 1:
            raise too_few_values(self.layer, 1, tuple(x.shape))
        self.key, self.has_updated_running, self.running = key, self.running is not None, None
        return output

    def _round(self, row: NativeRow, found: Aggregate | NativeResult, count: int | None = None) -> RoundKey:
        """Finishes a pass with the result of its round; `count` is over all ranks, by default the aggregate's."""
        if isinstance(found, Aggregate) and not row.is_finished:
            if found.non_finite.runs:
                non_finite.check(self.transport, row.brought, found)
            row.finish(found.values, found.count if count is None else count)
        return found.key

    def may_compute(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> bool:
        """Whether the core supports these tensors, which hooks or users may have changed since the forward pass."""
        return supports(grad) and supports(x) and x.shape == self.shape and supports_parameter(weight)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of input, weight and bias; None for those not needed."""
        if not x.is_contiguous() or grad.dtype != x.dtype or grad.stride() != x.stride():
            grad, x = same_layout(grad, x)
        needs_input, needs_weight, needs_bias = needs
        bias = compute_type(x)
        of = None if weight is None else weight.dtype
        plan = plan_of(x.shape, x.dtype, x.is_contiguous(), torch.get_num_threads(), of, bias)
        of_input = output_for(x) if needs_input else None
        of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
        of_bias = torch.empty(plan.channels, dtype=bias, device="cpu") if needs_bias else None
        room = plan.backward.room()
        row = NativeRow(
            plan.backward, room, plan.count, plan.channels, plan.address, room,
            ctypes.addressof(self.room) + 8 * (4 * plan.channels + 2), grad.data_ptr(), x.data_ptr(),
            None if of_input is None else of_input.data_ptr(),
            None if weight is None else weight.data_ptr() or refuse(weight),
            None if of_weight is None else of_weight.data_ptr(), None if of_bias is None else of_bias.data_ptr(),
        )  # fmt: skip
        if needs_input:
            # The count stays forward's: a member lost since then sends no gradient, but is part of the statistics.
            count = int(self.room[4 * plan.channels + 1])
            self._round(row, self.transport.run_row(row, self.next_key(BACKWARD), self.phase), count)
        else:  # parameters keep their local sums, as under DDP
            row.run(EXCHANGE)
        return of_input, of_weight, of_bias

    def made_when_asked(self, name: str) -> Any:
        """Returns the local moments, the moments of the whole batch, or its statistics."""
        if name not in {"local", "moments", "statistics"}:
            return None
        channels, values = self.plan.channels, torch.from_numpy(np.frombuffer(self.room))
        count = int(values[4 * channels + 1])
        if name == "local":
            sums, squares = values[: 2 * channels].view(2, -1)
            return [ChannelMoments(self.plan.count, sums, squares, tuple(self.shape))]
        if name == "moments":
            return ChannelMoments(count, *values[2 * channels + 1 : 4 * channels + 1].view(2, -1))
        return ChannelStatistics(count, *values[4 * channels + 2 :].view(3, -1))
