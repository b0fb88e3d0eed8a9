"""Programs of the ranks in `test_ranks.py`; rows stay on devices, which the CPU represents."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import client
from client.ops import non_finite
from client.ops.device_errors import Slot
from client.ops.exchange import Exchange
from client.ops.statistics import ChannelStatistics
from client.transports import device_rows
from client.transports.choose import transport_for
from client.transports.device_rows import LocalRows
from support.no_host import WAYS, HostLooks, host_looks_at_nothing
from support.sentences import client_log, error_of

CHANNELS = 3
SIZES = (4, 0, 5)

Step = Callable[[nn.Module, Tensor], None]


def _plain(layer: nn.Module, x: Tensor) -> None:
    layer(x).square().sum().backward()


def _masked(layer: nn.Module, x: Tensor) -> None:
    layer(x, x[:, 0] > 0).square().sum().backward()


def _twice_differentiated(layer: nn.Module, x: Tensor) -> None:
    (by_input,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
    by_input.square().sum().backward()


def _checkpointed(layer: nn.Module, x: Tensor) -> None:
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()


def _in_micro_batches(layer: nn.Module, x: Tensor) -> None:
    layer.chunks = 2
    (layer(x).square() + layer(x + 1)).sum().backward()


STEPS: dict[str, Step] = {
    "plain": _plain,
    "masked": _masked,
    "twice differentiated": _twice_differentiated,
    "checkpointed": _checkpointed,
    "in micro-batches": _in_micro_batches,
}


def step_without_a_host_read(rank: Any, how: str) -> int:
    """Returns the number of updates of the running statistics; after the first step the host must not read a value."""
    layer = _layer("bn", momentum=None)
    for number in range(3):
        x = torch.randn(SIZES[rank.rank], CHANNELS, 4, requires_grad=True)
        # In the first step the ranks agree, and buffers for the flags are allocated.
        with host_looks_at_nothing() if number else nullcontext():
            STEPS[how](layer, x)
    return int(layer.num_batches_tracked)


def read_statistic(_rank: Any, way: str) -> str:
    """Read a statistic on the host; returns "seen" if the read is detected, else "not seen"."""
    of = ChannelStatistics.of

    def planted(*given: Any) -> ChannelStatistics:
        found = of(*given)
        WAYS[way](found.mean[0])
        return found

    layer = _layer("bn")
    _plain(layer, torch.randn(4, CHANNELS, 4, requires_grad=True))
    with mock.patch.object(ChannelStatistics, "of", planted):
        try:
            with host_looks_at_nothing():
                layer(torch.randn(4, CHANNELS, 4))
        except HostLooks:
            return "seen"
    return "not seen"


@contextmanager
def behind() -> Iterator[Callable[[], None]]:
    """Makes the device lag behind the host until the yielded function is called."""
    is_filled = mock.Mock(return_value=False)

    def catch_up() -> None:
        is_filled.return_value = True

    with mock.patch.object(Slot, "is_filled", is_filled):
        yield catch_up


def part_ways(rank: Any) -> tuple[bool, bool, str]:
    """In the third call of a step rank 1 calls another layer than the others; returns `_call_and_compare`'s result."""
    layers = [_layer("stem.bn"), _layer("head.bn")]
    x = torch.randn(4, CHANNELS, 4, requires_grad=True)
    for layer in layers:
        layer(x)
    return _call_and_compare(layers[rank.rank == 1], x)


def _call_and_compare(layer: Any, x: torch.Tensor, *mask: torch.Tensor) -> tuple[bool, bool, str]:
    """Returns whether the output is NaN, whether the running statistics stayed, and the error of the next call."""
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with behind() as catch_up:
        output = layer(x, *mask)
        stayed = all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
        catch_up()
        return bool(output.isnan().all()), stayed, error_of(layer, x)


def begin_in_different_layers(rank: Any) -> str:
    """The ranks call different layers in the first step; returns the error."""
    layer = _layer(["stem.bn", "head.bn", "stem.bn"][rank.rank])
    return error_of(layer, torch.randn(4, CHANNELS, 4, requires_grad=True))


def have_too_few(rank: Any) -> tuple[bool, bool, str]:
    """The masks leave one value per channel over all ranks; returns `_call_and_compare`'s result."""
    mask = torch.zeros(2, 2, dtype=torch.bool)
    mask[0, 0] = rank.rank == 0
    return _call_and_compare(_layer("bn"), torch.randn(2, CHANNELS, 2), mask)


def bring_nan(rank: Any, phase: str) -> tuple[int, list[tuple[str, str]]]:
    """Rank 1 sends NaN; returns the number of log lines before the device has caught up, and all lines."""
    non_finite._local_reports.clear()
    layer = _layer("bn")
    x = torch.randn(4, CHANNELS, 4)
    gradient = torch.randn(4, CHANNELS, 4)
    (x if phase == "forward" else gradient)[1, 2, 3] = math.nan if rank.rank == 1 else 1.0
    with client_log(logging.INFO) as lines, behind() as catch_up:
        layer(x.requires_grad_()).backward(gradient)
        before = sum("first non-finite" in text for _, text in lines)
        catch_up()
        layer(torch.randn(4, CHANNELS, 4))
    return before, [(level, text) for level, text in lines if "first non-finite" in text]


def add_negative_zeros(rank: Any) -> tuple[list[float], bool, float]:
    """Rank 1 brings a row more than rank 0; returns the sum, whether all its sign bits are set, and the count."""
    transport = transport_for("bn", None)
    rows = LocalRows(
        torch.ones(1 + rank.rank, dtype=torch.float64), torch.full((1 + rank.rank, 2, 1), -0.0, dtype=torch.float64)
    )
    aggregate = device_rows.run(transport, rows, capacity=2)
    return aggregate.values.flatten().tolist(), bool(aggregate.values.signbit().all()), float(aggregate.count)


def with_one_on_the_host(rank: Any) -> tuple[bool, np.ndarray]:
    """Rank 1's input is on the host; returns whether rows stayed on devices, and the output."""
    layer = _layer("bn")
    here = mock.patch.object(device_rows, "are_on_devices", return_value=False) if rank.rank == 1 else nullcontext()
    made = []

    class Noted(Exchange):
        def forward(self, local: Any) -> None:
            made.append(self.capacity)
            super().forward(local)

    with here, mock.patch("client.nn.call.Exchange", Noted):
        output = layer(sample(rank.rank))
    return any(made), output.detach().numpy()


def move_away(rank: Any) -> str:
    """Rank 1's second input is on the host; returns its error."""
    layer = _layer("bn")
    layer(sample(rank.rank))
    if rank.rank == 0:
        return ""
    with mock.patch.object(device_rows, "are_on_devices", return_value=False):
        return error_of(layer, sample(rank.rank))


def sample(number: int) -> Tensor:
    return torch.randn(4, CHANNELS, 4, generator=torch.Generator().manual_seed(number))


def _layer(name: str, **options: Any) -> nn.Module:
    layer = client.SynchronizedBatchNorm1d(CHANNELS, **options)
    layer.layer_name = name
    return layer
