"""NativeExchange: the plain call of a layer on a CPU, computed by the native core."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.autograd import non_finite
from client.autograd.findings import too_few
from client.autograd.functional import Slice
from client.autograd.plain import PlainExchange, is_plain
from client.ops import native
from client.ops.layout import alike
from client.ops.native import (
    check,
    functions_for,
    output_for,
    parameter,
    ready,
    slice_of,
    takes,
    takes_parameter,
)
from client.ops.running import Running
from client.ops.statistics import ChannelMoments, ChannelStatistics
from client.ops.vectors import compute_type
from statsd_bn.reduction import FloatArray
from statsd_bn.round_key import BACKWARD
from statsd_bn.rows import Rows, sound_rows

# Of an array: shares its memory.
_Start: Any = ctypes.c_char * 0


def serves(slices: list[Slice]) -> bool:
    """Whether the core serves a call with these slices, whose rows go over the host."""
    mine = slices[0]
    x = mine.input
    return (
        len(slices) == 1
        and native.core is not None
        and takes(x)
        and x.numel() > 0
        and is_plain(mine)
        and takes_parameter(mine.weight)
        and takes_parameter(mine.bias)
        and not (x.is_inference() and torch.is_grad_enabled())  # autograd refuses it, but only after the round
    )


class Buffer:
    """Float64 vectors of one pass, one behind the other: the own row, the sum of all rows, and more.

    A row is 2 * C + 1 long: two vectors, and the count.

    Args:
        channels: C.
        more: values behind the two rows.

    Attributes:
        row: address of the own row.
        total: address of the sum of all rows.
        more: address of what is behind.
    """

    __slots__ = ("_channels", "_values", "more", "row", "total")

    def __init__(self, channels: int, more: int = 0) -> None:
        size = 2 * channels + 1
        self._channels, self._values = channels, np.empty(2 * size + more)
        # In a third of the time that arrays and tensors take to say where they are.
        self.row = ctypes.addressof(_Start.from_buffer(self._values))
        self.total = self.row + 8 * size
        self.more = self.total + 8 * size

    @property
    def vectors(self) -> FloatArray:
        """The vectors of the own row, shape (1, 2, C)."""
        channels = self._channels
        return self._values[: 2 * channels].reshape(1, 2, channels)

    def take(self, values: FloatArray, count: float) -> None:
        """Takes the vectors of the sum of all rows, shape (2, C), and its count."""
        channels = self._channels
        self._values[2 * channels + 1 : 4 * channels + 1] = values.ravel()
        self._values[4 * channels + 1] = count

    def moments(self, count: int, shape: tuple[int, ...], *, of_all: bool) -> ChannelMoments:
        """Returns the own row, or the sum of all rows, as moments of so many values."""
        start = (2 * self._channels + 1) * of_all
        sums, squares = torch.from_numpy(self._values[start : start + 2 * self._channels]).view(2, -1)
        return ChannelMoments(count, sums, squares, shape)

    def statistics(self, count: int) -> ChannelStatistics:
        """Returns what is behind the rows in a forward pass."""
        channels = self._channels
        mean, invstd, slope = (self._values[-n * channels :][:channels] for n in (3, 2, 1))
        return ChannelStatistics(count, *map(torch.from_numpy, (mean, invstd, slope)))


@dataclass(slots=True, eq=False)
class NativeExchange(PlainExchange):
    """One layer's call, see `PlainExchange`.

    Attributes:
        first: the rows of the forward pass, and behind them mean, inverse deviation and slope.
        shape: of the input.
        own: its values per channel.
        count: those of the whole batch.
    """

    first: Buffer = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    own: int = field(init=False)
    count: int = field(init=False)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output for the input, after the forward round if there was none."""
        x = ready(x)
        core, slice_ = functions_for(x), slice_of(x)
        of_weight, of_bias = parameter(weight), parameter(bias)
        if self.is_done:
            output = output_for(x)
            kept = self.first.more
            check(core.sbn_normalize(slice_.address, x.data_ptr(), output.data_ptr(), kept, *of_weight, *of_bias))
            return output
        self._forward_round(x, core, slice_.address)
        output, first, (mean, var, tracked, momentum) = output_for(x), self.first, self.running or Running()
        self.has_moved, self.running = self.running is not None, None
        check(
            core.sbn_forward(
                slice_.address, x.data_ptr(), output.data_ptr(), first.total, self.eps, self.eps_mode == "clamp",
                first.more, *of_weight, *of_bias, None if mean is None else mean.data_ptr(), *parameter(var),
                None if tracked is None else tracked.data_ptr(), momentum,
            )
        )  # fmt: skip
        return output

    def _forward_round(self, x: Tensor, core: Any, slice_: int) -> None:
        self.shape = shape = x.shape
        channels = shape[1]
        self.own = own = x.numel() // channels
        self.first = first = Buffer(channels, 3 * channels)
        check(core.sbn_moments(slice_, x.data_ptr(), first.row))
        rows = Rows((own,), first.vectors)
        aggregate = self.transport.run_slave(rows, phase=self.phase)
        if aggregate.non_finite.runs:
            non_finite.check(self.transport, rows, aggregate)
        self.count = count = aggregate.count
        if count == 1:
            raise too_few(self.layer, 1, tuple(shape))
        first.take(aggregate.values, count)
        self.key = aggregate.key

    def may_compute(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> bool:
        """Whether what hooks and users left of the forward pass's tensors is such as the core takes."""
        return takes(grad) and takes(x) and x.shape == self.shape and takes_parameter(weight)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of input, weight and bias, as far as they are needed."""
        grad, x = alike(grad, x)
        core, slice_ = functions_for(x), slice_of(x)
        needs_input, needs_weight, needs_bias = needs
        channels = x.shape[1]
        this, kept = Buffer(channels), self.first.more
        check(core.sbn_backward_sums(slice_.address, grad.data_ptr(), x.data_ptr(), kept, this.row))
        of_input = None
        if needs_input:
            self._backward_round(this)
            of_input = output_for(x)
        of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
        of_bias = torch.empty(channels, dtype=compute_type(x), device="cpu") if needs_bias else None
        check(
            core.sbn_backward(
                slice_.address, grad.data_ptr(), x.data_ptr(), None if of_input is None else of_input.data_ptr(), kept,
                this.total, this.row, *parameter(weight), None if of_weight is None else of_weight.data_ptr(),
                *parameter(of_bias),
            )
        )  # fmt: skip
        return of_input, of_weight, of_bias

    def _backward_round(self, this: Buffer) -> None:
        rows = sound_rows((self.own,), this.vectors)
        aggregate = self.transport.run_slave(rows, self._next_key(BACKWARD))
        if aggregate.non_finite.runs:
            non_finite.check(self.transport, rows, aggregate)
        this.take(aggregate.values, self.count)

    def made_when_asked(self, name: str) -> Any:
        """Returns local moments, those of the whole batch, and statistics."""
        if name == "local":
            return [self.first.moments(self.own, tuple(self.shape), of_all=False)]
        if name == "moments":
            return self.first.moments(self.count, (), of_all=True)
        if name == "statistics":
            return self.first.statistics(self.count)
        return None
