"""The transports between processes, for tests that hold over each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from client.conversation import member
from client.kernels import backends, device_statistics
from client.transports import device_rows

PROCESS_GROUP = "process group"
ON_DEVICE = "process group, on devices"
HOST_TRANSPORTS = (*member.TRANSPORTS, PROCESS_GROUP)
TRANSPORTS = (*HOST_TRANSPORTS, ON_DEVICE)


@contextmanager
def rows_on_devices() -> Iterator[None]:
    """Takes the CPU for a device whose rows stay there, and gloo for a backend that gathers them there.

    On a CPU `rsqrt` is what rounds as CUDA's square root and quotient do: torch's own square root there is MKL's, whose
    last bits depend on the processor.
    """
    with (
        mock.patch.multiple(device_rows, TYPES=frozenset({"cpu"}), OVER_THE_HOST=frozenset()),
        mock.patch.object(device_statistics, "inverse_root", Tensor.rsqrt),
    ):
        yield


@contextmanager
def elementwise_kernels() -> Iterator[None]:
    """Has all transports compute as rows on devices do without CUDA, since other kernels round otherwise."""
    with mock.patch.object(backends, "_WITHOUT_MASK", ()):
        yield
