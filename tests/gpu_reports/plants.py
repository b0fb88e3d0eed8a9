"""Faults that a step of the GPU report must find; each is entered in the step's process."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from client.kernels.device_statistics import DeviceStatistics
from client.lanes import device_rows
from client.layers import call


@contextmanager
def wrong_product() -> Iterator[None]:
    """A device that multiplies wrongly."""
    with mock.patch.object(Tensor, "__matmul__", lambda one, other: torch.mm(one, other) + 1):
        yield


@contextmanager
def value_read() -> Iterator[None]:
    """The host reads one value of the statistics, for which it has to wait."""
    of = DeviceStatistics.of

    def reading(*given: object) -> DeviceStatistics:
        found = of(*given)
        found.mean[0].item()
        return found

    with mock.patch.object(DeviceStatistics, "of", reading):
        yield


@contextmanager
def wrong_sum() -> Iterator[None]:
    """Sums that are a thousandth too large."""
    add = device_rows._sum

    def wrong(*given: object) -> tuple[Tensor, Tensor]:
        count, values = add(*given)
        return count, values * 1.001

    with mock.patch.object(device_rows, "_sum", wrong):
        yield


@contextmanager
def rows_over_host() -> Iterator[None]:
    """Rows that leave their device although they need not."""
    with mock.patch.object(device_rows, "_gathers_on_devices", return_value=False):
        yield


@contextmanager
def moved_twice() -> Iterator[None]:
    """Running statistics that each batch moves twice."""
    move = call.running_stats.move_by

    def twice(*given: object) -> None:
        move(*given)
        move(*given)

    with mock.patch.object(call.running_stats, "move_by", twice):
        yield
