"""TritonExchange: the plain call on CUDA, computed by Triton's kernels, and the check that they work on a device."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from math import isnan
from typing import Any

import torch
from torch import Tensor

from client.ops import non_finite
from client.ops.device_errors import DeviceErrors, Flags, TooFewValues, async_checks
from client.ops.exchange import PlainExchange
from client.ops.functional import Slice, is_plain
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running, dense, same_layout
from client.ops.triton import launch
from client.transports import device_rows
from client.transports.device_rows import DeviceAggregate, LocalRows
from client.transports.process_group import ProcessGroupPipe
from statsd_bn.round_key import BACKWARD, RoundKey

logger = logging.getLogger("statsd_bn.client")

# Older versions pass numbers to kernels as float32, whatever their annotation.
OLDEST = (3, 4)

TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def serves(slices: Sequence[Slice], capacity: int) -> bool:
    """Whether the kernels can compute a call with these slices, where each rank sends `capacity` rows."""
    mine = slices[0]
    return capacity == len(slices) == 1 and is_plain(mine) and supports(mine.input, mine.weight, mine.bias)


def supports(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernels can compute with an input and its parameters, on the input's device."""
    is_plain_memory = type(x) in {Tensor, torch.nn.Parameter} and not x.is_neg()
    if not is_plain_memory or x.dtype not in TYPES or not x.is_cuda or not works_on(x.device, x.dtype):
        return False
    return launch.fits(x) and all(each is None or each.device == x.device for each in (weight, bias))


@cache
def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton compiles for inputs of a type on a device; logs the reason once if not.

    All kernels are tried: if one failed in a round, the other ranks would wait in that round.
    """
    try:
        version = import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise ImportError(f"expected Triton {'.'.join(map(str, OLDEST))} or newer, got {version}")  # noqa: TRY301
        launch.try_out(device, dtype)
    except Exception as error:  # noqa: BLE001 - compilers, drivers and the import fail in many ways
        logger.warning(
            "Triton failed for %s on %s (%s: %.300s); layers use torch's operators, which cost more host time",
            dtype,
            device,
            type(error).__name__,
            error,
        )
        return False
    return True


@dataclass(slots=True, eq=False)
class TritonExchange(PlainExchange):
    """A plain call on CUDA, by Triton's kernels."""

    shape: tuple[int, ...] = field(init=False)  # of the input
    first: launch.Pass = field(init=False)  # the forward pass

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Launch the kernels; the host does not wait for them."""
        x = dense(x)
        with launch.on_device_of(x):
            if self.key is None:
                self.shape = tuple(x.shape)
                gathers = isinstance(self.transport, ProcessGroupPipe)
                self.first = launch.Pass(x, device_rows.nr_ranks(self.transport), gathers=gathers)
                self.key = self._forward_round(x, weight, bias)
            return self.first.affine(None, x)

    def _forward_round(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> RoundKey:
        async_checks.poll(x.device)
        first = self.first
        key = device_rows.run_row(self.transport, partial(first.write_row, None, x), phase=self.phase)
        wait = non_finite.raises(self.transport, key)
        # A round that may raise updates nothing here; a cumulative average is updated by the layer.
        running = None if wait or (self.running and isnan(self.running.momentum)) else self.running
        clamp = self.eps_mode == "clamp"
        first.finish(weight, bias, running or Running(), self.eps, clamp=clamp)
        self.has_updated_running = running is not None
        self._submit(first, key, TooFewValues(first.flags, self.layer, self.shape), wait=wait)
        if not self.has_updated_running:
            self.moments = ChannelMoments(first.work[0], _total(first.rows, first.ranks)[1])
        first.release_rows()
        return key

    def lazy_attribute(self, name: str) -> Any:
        """Local moments or statistics, from the forward buffer."""
        if name == "local":
            return [ChannelMoments(self.first.count, self.first.row[2:].view(2, -1), self.shape)]
        if name == "statistics":
            return ChannelStatistics(self.first.work[0].clamp(min=1), self.first.statistics)
        return None

    def _submit(
        self, of: launch.Pass, key: RoundKey, too_few: TooFewValues | None = None, *, wait: bool = False
    ) -> None:
        # Without `self`: unchecked flags would keep the call alive, and checkpoints would assume that its graph is too.
        transport, row, rows, blocks = self.transport, of.row, of.rows, of.blocks
        others = of.flags if of.gathers else None

        def report(flags: Flags) -> None:
            ranks = device_rows.ranks_of(transport)
            aggregate = DeviceAggregate(key, *_total(rows, len(ranks)), rows.view(len(ranks), -1)[:, 1:], ranks, others)
            contribution = LocalRows(row[1:2].unbind(), row[2:].view(1, 2, -1))
            DeviceErrors(transport, contribution, aggregate, too_few).report_rows(flags, blocks)

        async_checks.submit(of.flags, report, wait=wait)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...] | None:
        """Launch the kernels of the backward pass."""
        is_alike = self.shape == tuple(x.shape) == tuple(grad.shape)
        if not is_alike or not supports(x, weight, None) or (weight is not None and weight.shape != x.shape[1:2]):
            return None
        x = dense(x)
        if grad.dtype != x.dtype or grad.stride() != x.stride():
            grad, x = same_layout(grad, x)
        needs_input, needs_weight, needs_bias = needs
        with launch.on_device_of(x):
            async_checks.poll(x.device)
            backward = launch.Pass(x, self.first.ranks, self.first.work, gathers=self.first.gathers)
            write, key = partial(backward.write_row, grad, x), None
            if needs_input:
                key = device_rows.run_row(self.transport, write, self.next_key(BACKWARD))
            else:  # parameters keep their local sums, as under DDP
                write(0)
            of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
            of_bias = torch.empty(x.shape[1], dtype=torch.float32, device=x.device) if needs_bias else None
            backward.finish_backward(weight, of_weight, of_bias, has_round=needs_input)
            if key is None:
                return None, of_weight, of_bias
            self._submit(backward, key)
            return backward.affine(grad, x), of_weight, of_bias


def _total(rows: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    return device_rows.sum_rows(rows.view(ranks, -1)[:, 1:], (2, -1))
