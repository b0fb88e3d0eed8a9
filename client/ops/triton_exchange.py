"""TritonExchange: the plain call of a layer on CUDA, computed by Triton's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from client.ops import non_finite
from client.ops.findings import Few, Findings, hand_in_of_rows, verdicts
from client.ops.functional import Slice
from client.ops.plain import PlainExchange, is_plain
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running
from client.ops.triton import available
from client.ops.vectors import alike, dense
from client.transports import device_rows
from client.transports.device_rows import DeviceAggregate, LocalRows
from client.transports.process_group import ProcessGroupPipe
from client.transports.transport import Transport
from statsd_bn.round_key import BACKWARD, RoundKey

if TYPE_CHECKING:
    from client.ops.triton.launch import Backward, Forward


def serves(slices: Sequence[Slice], capacity: int) -> bool:
    """Whether the kernels serve a call with these slices, to whose rounds each rank brings so many rows."""
    mine = slices[0]
    return capacity == len(slices) == 1 and is_plain(mine) and available.serves(mine.input, mine.weight, mine.bias)


@dataclass(slots=True, eq=False)
class TritonExchange(PlainExchange):
    """One layer's call, see `PlainExchange`.

    Attributes:
        shape: of the input.
        first: the forward pass.
    """

    shape: tuple[int, ...] = field(init=False)
    first: "Forward" = field(init=False)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output for the input, after the forward round if there was none."""
        from client.ops.triton import launch  # noqa: PLC0415 - needs Triton

        x = dense(x)
        with launch.on_device_of(x):
            if not self.is_done:
                self._forward_round(launch.Forward, x, weight, bias)
            return self.first.normalise(x)

    def _forward_round(self, made: type["Forward"], x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        verdicts.look(x.device)
        self.shape = tuple(x.shape)
        self.first = first = made(x, device_rows.nr_ranks(self.transport), gathers=self._gathers)

        def write(digest: int) -> tuple[Tensor, Tensor]:
            first.write_row(x, digest)
            return first.row, first.rows

        key = device_rows.run_row(self.transport, write, phase=self.phase)
        at_once = non_finite.raises(self.transport, key)
        # What is refused moves nothing; a cumulative average the layer moves.
        running = None if at_once or (self.running and isnan(self.running.momentum)) else self.running
        first.finish(
            _contiguous(weight), _contiguous(bias), running or Running(), self.eps, clamp=self.eps_mode == "clamp"
        )
        self.has_moved = running is not None
        self._hand_in(first, key, Few(first.flags, self.layer, self.shape), at_once=at_once)
        if not self.has_moved:
            _, (sums, squares) = _total(first.rows, first.ranks)
            self.moments = ChannelMoments(first.work[0], sums, squares)
        first.let_go()
        self.key = key

    def made_when_asked(self, name: str) -> Any:
        """Returns local moments and statistics."""
        first = self.first
        if name == "local":
            sums, squares = first.row[2:].view(2, -1)
            return [ChannelMoments(first.count, sums, squares, self.shape)]
        if name == "statistics":
            return ChannelStatistics(first.work[0].clamp(min=1), *first.vectors(0, 1, 2))
        return None

    @property
    def _gathers(self) -> bool:
        return isinstance(self.transport, ProcessGroupPipe)

    def _hand_in(self, of: "Forward | Backward", key: RoundKey, few: Few | None = None, *, at_once: bool) -> None:
        # Without `self`: a call that is kept as long as its flags would look to checkpoints as if its graph lived.
        others = of.flags if self._gathers else None
        findings = partial(_findings, self.transport, key, of.row, of.rows, others, few)
        hand_in_of_rows(of.flags, of.blocks, findings, at_once=at_once)

    def may_compute(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> bool:  # noqa: ARG002 - copied to be alike
        """Whether input and weight are such as the kernels take."""
        return tuple(x.shape) == self.shape and available.serves(x, weight, None)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of input, weight and bias, as far as they are needed."""
        from client.ops.triton import launch  # noqa: PLC0415 - as above

        x = dense(x)
        if grad.dtype != x.dtype or grad.stride() != x.stride():
            grad, x = alike(grad, x)
        with launch.on_device_of(x):
            return self._gradients(launch.Backward, grad, x, weight, needs)

    def _gradients(
        self, made: type["Backward"], grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        verdicts.look(x.device)
        needs_input, needs_weight, needs_bias = needs
        this = made(self.first, x, gathers=self._gathers)

        def write(digest: int) -> tuple[Tensor, Tensor]:
            this.write_row(grad, x, digest)
            return this.row, this.rows

        key = None
        if needs_input:
            key = device_rows.run_row(self.transport, write, self._next_key(BACKWARD))
        else:  # parameters keep their local sums, as under DDP
            write(0)
        of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
        of_bias = torch.empty(x.shape[1], dtype=torch.float32, device=x.device) if needs_bias else None
        this.finish(_contiguous(weight), of_weight, of_bias, has_round=needs_input)
        if key is None:
            return None, of_weight, of_bias
        self._hand_in(this, key, at_once=False)
        return this.input_gradient(grad, x), of_weight, of_bias


def _findings(
    transport: Transport, key: RoundKey, row: Tensor, rows: Tensor, others: Tensor | None, few: Few | None
) -> Findings:
    ranks = device_rows.ranks_of(transport)
    count, values = _total(rows, len(ranks))
    aggregate = DeviceAggregate(key, count, values, rows.view(len(ranks), -1)[:, 1:], ranks, others)
    return Findings(transport, _rows(row), aggregate, few)


def _total(rows: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    return device_rows.total(rows.view(ranks, -1)[:, 1:], (2, -1))


def _rows(row: Tensor) -> LocalRows:
    return LocalRows(row[1:2].unbind(), row[2:].view(1, 2, -1))


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()
