"""Faults that a step of the GPU report must find, as context managers that the step's process enters."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, distributed

from client.nn import call, custom_op
from client.ops import engine
from client.ops.statistics import ChannelStatistics
from client.transports import device_rows
from client.transports.device_rows import LocalRows


@contextmanager
def wrong_product() -> Iterator[None]:
    """The device multiplies wrongly."""
    with mock.patch.object(Tensor, "__matmul__", lambda one, other: torch.mm(one, other) + 1):
        yield


@contextmanager
def value_read() -> Iterator[None]:
    """The host reads a value of the statistics, and so waits for the device."""
    of = ChannelStatistics.of

    def reading(*given: object) -> ChannelStatistics:
        found = of(*given)
        found.mean[0].item()
        return found

    with mock.patch.object(ChannelStatistics, "of", reading):
        yield


@contextmanager
def wrong_sum() -> Iterator[None]:
    """Sums are a thousandth too large."""
    add = device_rows.sum_rows

    def wrong(*given: object) -> tuple[Tensor, Tensor]:
        count, values = add(*given)
        return count, values * 1.001

    with mock.patch.object(device_rows, "sum_rows", wrong):
        yield


@contextmanager
def rows_over_host() -> Iterator[None]:
    """Rows are copied to the host although they could stay on their device."""
    with mock.patch.object(device_rows, "gathers_on_devices", return_value=False):
        yield


@contextmanager
def moved_twice() -> Iterator[None]:
    """Each batch moves the running statistics twice."""
    move = call.running_stats.update_from

    def twice(*given: object) -> None:
        move(*given)
        move(*given)

    with mock.patch.object(call.running_stats, "update_from", twice):
        yield


@contextmanager
def narrow_sums() -> Iterator[None]:
    """Sums are sent in float32, which loses the variance where the mean is large."""
    of = LocalRows.of
    with mock.patch.object(LocalRows, "of", lambda counts, rows: of(counts, [row.float().double() for row in rows])):
        yield


@contextmanager
def wide_output() -> Iterator[None]:
    """Outputs are in float32, whatever the input's type."""
    normalise = engine.normalise
    with mock.patch.object(engine, "normalise", lambda *given: normalise(*given).float()):
        yield


@contextmanager
def counted_on_host() -> Iterator[None]:
    """The host adds its count of calls to the statistics; a graph would replay the same count each time."""
    of, numbers = ChannelStatistics.of, itertools.count()

    def counted(*given: object) -> ChannelStatistics:
        found = of(*given)
        vectors = found.vectors.clone()
        vectors[0] += next(numbers)
        return ChannelStatistics(found.count, vectors)

    with mock.patch.object(ChannelStatistics, "of", counted):
        yield


@contextmanager
def compiled_without_round() -> Iterator[None]:
    """A compiled backward pass takes no round, and uses sums of 0."""
    with mock.patch.object(custom_op, "backward_round", lambda _transport, rows, *_: torch.zeros_like(rows.values[0])):
        yield


@contextmanager
def own_order() -> Iterator[None]:
    """Each rank adds its own row first, so the ranks' sums differ in the last bits."""
    add = device_rows.sum_rows

    def from_own(rows: Tensor, shape: object) -> tuple[Tensor, Tensor]:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        return add(rows.roll(-rank, 0), shape)

    with mock.patch.object(device_rows, "sum_rows", from_own):
        yield


@contextmanager
def same_digests() -> Iterator[None]:
    """Ranks cannot tell rounds apart."""
    with mock.patch.object(device_rows, "key_digest", return_value=1):
        yield


@contextmanager
def over_server() -> Iterator[None]:
    """Rows of processes of one host go over the server."""
    with mock.patch.dict(os.environ, STATSD_BN_TRANSPORT="server"):
        yield


@contextmanager
def missing_wait() -> Iterator[None]:
    """Gathered rows are read before they arrive: every rank finds copies of its own rows."""
    gather = device_rows._all_gather

    def unwaited(everybodys: Tensor, words: Tensor, group: object) -> None:
        gather(torch.empty_like(everybodys), words, group=group)
        everybodys.view(-1, *words.shape).copy_(words)

    with mock.patch.object(device_rows, "_all_gather", unwaited):
        yield
