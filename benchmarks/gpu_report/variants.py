"""Four kinds of batch norm, in a process group of one rank: torch's two, and ours with rows on the device or the host.

One rank is enough to send every round through NCCL, so launches, copies, synchronisations and the host's time equal
those of a rank among many, without the wait for other ranks. `SyncBatchNorm` and our layer would skip the exchange in a
world of one, so torch's function is called without its module, and our layer's check is patched. Only this module and
`worlds` patch internals of the client.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, distributed, nn
from torch.nn.modules._functions import SyncBatchNorm

import client
from client.nn import batchnorm
from client.transports import device_rows
from gpu_report import torchs_operators
from gpu_report.step import Step
from support.transports import rows_on_devices

PLAIN = "BatchNorm2d"
TORCHS = "SyncBatchNorm"
ON_DEVICE = "ours, on the device"
OVER_HOST = "ours, over the host"


@dataclass(frozen=True)
class Variant:
    """A kind of batch norm.

    Attributes:
        name: of the kind, in tables.
        make: returns a layer of so many channels, with torch's defaults.
        entered: returns the context of each forward and backward pass.
    """

    name: str
    make: Callable[[int], nn.Module]
    entered: Callable[[], AbstractContextManager[object]] = nullcontext


class _TorchsLayer(nn.BatchNorm2d):
    """`torch.nn.SyncBatchNorm` as it is with more than one rank."""

    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        output: Tensor = SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum, self.group, 1
        )
        return output


@contextmanager
def in_a_world_of_one(step: Step) -> Iterator[list[Variant]]:
    """Makes this process the only rank of a group over NCCL, or gloo for the stand-in, and yields the variants in it.

    The groups stay until the process ends, since NCCL may hang when it destroys them.
    """
    backend = step.pick("nccl", "gloo")
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    world, over_host = distributed.group.WORLD, distributed.new_group(backend="gloo")

    def torchs(channels: int) -> nn.Module:
        layer = _TorchsLayer(channels)
        layer.group = world
        return layer

    def ours(group: Any) -> Callable[[int], nn.Module]:
        return lambda channels: client.SynchronizedBatchNorm2d(channels, process_group=group)

    with mock.patch.object(batchnorm, "communicator_for", lambda group: group):
        yield [
            Variant(PLAIN, nn.BatchNorm2d),
            Variant(TORCHS, torchs, step.pick(nullcontext, torchs_operators.stood_in)),
            Variant(ON_DEVICE, ours(world), step.pick(nullcontext, rows_on_devices)),
            Variant(OVER_HOST, ours(over_host)),
        ]


@dataclass
class RoundsOnDevice:
    """How many rounds were exchanged on the device."""

    number: int = 0


@contextmanager
def rounds_on_device() -> Iterator[RoundsOnDevice]:
    """Counts the rounds of this process whose rows stay on the device."""
    found, run_row = RoundsOnDevice(), device_rows.run_row

    def counted(*given: Any, **named: Any) -> Any:
        found.number += 1
        return run_row(*given, **named)

    with mock.patch.object(device_rows, "run_row", counted):
        yield found
