"""The transports between processes, for tests that run over each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from client.ops import engine, native
from client.session.protocol import member
from client.transports import device_rows

PROCESS_GROUP = "process group"
ON_DEVICE = "process group, on devices"

# Process groups that a server watches: requested, or chosen because rows are on devices.
WATCHED = "process group, watched"
CHOSEN = "process group, chosen"
HOST_TRANSPORTS = (*member.TRANSPORTS, PROCESS_GROUP)
TRANSPORTS = (*HOST_TRANSPORTS, ON_DEVICE)


@contextmanager
def rows_on_devices() -> Iterator[None]:
    """Treat the CPU as a device: rows stay there, gloo gathers them, and the native core is not used."""
    without_core = tuple(backend for backend in engine.BACKENDS if not isinstance(backend, native.Native))
    with (
        mock.patch.multiple(device_rows, DEVICE_TYPES=frozenset({"cpu"}), HOST_BACKENDS=frozenset()),
        mock.patch.object(engine, "BACKENDS", without_core),
    ):
        yield


@contextmanager
def reference_kernels() -> Iterator[None]:
    """Makes all transports compute with the reference backend: other kernels round differently."""
    with mock.patch.object(engine, "BACKENDS", ()), mock.patch.object(native, "core", None):
        yield
