"""Contexts in which layers on one GPU synchronise with rows on the device, or on the CPU that stands in for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn

import client
from client.nn import batchnorm
from client.transports import device_rows
from support.transports import rows_on_devices


@contextmanager
def rows_on(device: torch.device, *, also_over_gloo: bool = False) -> Iterator[None]:
    """Keeps rows on the device where the client would copy them over the host: on the CPU, and under gloo.

    Args:
        device: of the inputs.
        also_over_gloo: treat gloo as a backend that gathers on devices.
    """
    if device.type != "cuda":
        with rows_on_devices():
            yield
        return
    over_the_host = device_rows.HOST_BACKENDS - ({"gloo"} if also_over_gloo else set())
    with mock.patch.object(device_rows, "HOST_BACKENDS", over_the_host):
        yield


@contextmanager
def world_of_one(device: torch.device) -> Iterator[Any]:
    """Yields torch's default process group of this process alone, over NCCL on a GPU.

    Layers with this `process_group` send all their rounds through it, as with more ranks. The group stays until the
    process ends, since NCCL may hang when it destroys a group.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    with rows_on(device), mock.patch.object(batchnorm, "communicator_for", _as_given):
        yield distributed.group.WORLD


def _as_given(group: Any) -> Any:
    """Replaces the rule that a group of one rank needs no exchange."""
    return group


class Replicas(client.DataParallelWithCallback):
    """Virtual replicas on one device, with a given number of samples each, which may be 0.

    Args:
        module: the model.
        device: of all replicas.
        sizes: samples of each replica.
    """

    def __init__(self, module: nn.Module, device: torch.device, sizes: tuple[int, ...]) -> None:
        super().__init__(module, [device] * len(sizes))
        self.sizes = sizes

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Any) -> Any:
        """Splits the batch."""
        del kwargs, device_ids
        parts = list(zip(*(tensor.split(self.sizes, self.dim) for tensor in inputs), strict=True))
        return tuple(parts), tuple({} for _ in parts)
