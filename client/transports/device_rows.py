"""Rows that stay on their device: of replicas of one process, or of ranks that gather them by a backend such as NCCL.

A round here waits for no device: its error flags are a tensor too, and `client.ops.device_errors` reads them later.

All ranks of a process group must gather on devices, or all on hosts. They agree on it over the host before a layer's
first round, and thereby detect ranks that call another layer or have another number of channels. Later rounds carry the
digest of their key, by which each rank detects on its device that others are in another round.
"""

from collections.abc import Callable, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from client.transports.process_group import ProcessGroupPipe, gather_numbers, group_of, rounds_of, use_device
from client.transports.server import SlavePipe
from client.transports.transport import LocalPipe, Transport, key_digest
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from statsd_bn.reduction import FloatArray, Rows
from statsd_bn.round_key import FORWARD, RoundKey

DEVICE_TYPES = frozenset({"cuda"})  # devices that compute in float64, and copy to each other without the host
HOST_BACKENDS = frozenset({"gloo", "mpi"})  # backends that gather a device's tensors in host memory

# Renamed in torch 2.13.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

_AGREEMENT = "first "  # prefix of the phase of the round in which the ranks agree

Count = int | Tensor
"""Values per channel, an exact integer: an int if the host knows it, else a float64 tensor of shape ()."""

Write = Callable[[int], tuple[Tensor, Tensor]]
"""Writes this rank's message with a digest; returns the message, and the output for the messages of all ranks."""


def to_host(values: Tensor) -> FloatArray:
    """Copy a float64 tensor to an array; waits for its device."""
    if values.is_cuda:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        torch.cuda.current_stream(values.device).synchronize()
        values = host
    return values.numpy()


def from_host(values: FloatArray, device: torch.device) -> Tensor:
    """Copy an array to a device; the host does not wait for it."""
    copied = torch.from_numpy(np.array(values))
    return copied.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else copied


@dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """Rows of this process's replicas for one round."""

    counts: Sequence[Count]
    values: Tensor  # shape (replicas, vectors, C), float64, on the device of the first replica

    @classmethod
    def of(cls, counts: Sequence[Count], values: Sequence[Tensor]) -> "LocalRows":
        """Stack rows of replicas on several devices; the host does not wait for the copies."""
        lead = values[0].device
        return cls(counts, torch.stack([vectors.to(lead, non_blocking=True) for vectors in values]))

    def on_device(self) -> Tensor:
        """Format for device transports, shape (replicas, 1 + vectors * C): the count first."""
        lead = self.values.device
        column = [
            torch.full((), count, dtype=torch.float64, device=lead)
            if isinstance(count, int)
            else count.to(lead, non_blocking=True)
            for count in self.counts
        ]
        return torch.cat((torch.stack(column).unsqueeze(1), self.values.flatten(1)), 1)

    def on_host(self) -> Rows:
        """Format for host transports; waits for the device."""
        return Rows(tuple(map(int, self.counts)), to_host(self.values))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAggregate:
    """Sum of all rows of a round, on a device."""

    key: RoundKey
    count: Tensor  # shape ()
    values: Tensor  # shape (vectors, C)
    rows: Tensor  # shape (rows, 1 + vectors * C): the count, then the values
    ranks: list[int]  # of the rows, in order; all have the same number of rows
    mismatched: Tensor | None = None  # whether each rank is in another round, shape (ranks,), bool; None in one process


def may_use_devices(transport: Transport, x: Tensor) -> bool:
    """Whether `device_capacity` may be above 0: a fast check."""
    return x.device.type in DEVICE_TYPES or isinstance(transport, ProcessGroupPipe)


def device_capacity(
    transport: Transport, inputs: Sequence[Tensor], phase: str = FORWARD, *, on_host: bool = False, agree: bool = True
) -> int:
    """Rows that each rank contributes to a layer's rounds on its device; 0 if rows travel over the host."""
    # The ranks of a process group agree before a layer's first round, unless `agree` is False, as in backward passes.
    # `on_host` says, on all ranks alike, that the rows of this call travel over the host in any case.
    if not may_use_devices(transport, inputs[0]):
        return 0
    able = len(inputs) if are_on_devices(inputs) else 0
    if isinstance(transport, LocalPipe):
        return 0 if on_host else able
    if isinstance(transport, SlavePipe) and transport.group is None:
        transport.connection.world_transport.is_on_devices = able > 0  # for the negotiation
    if not isinstance(transport, ProcessGroupPipe):
        return 0
    group = group_of(transport)
    rounds = rounds_of(group)
    if not rounds.on_device.get(transport.layer):
        use_device(group, inputs[0].device)
    if on_host:
        return 0
    with rounds.lock:
        if transport.layer not in rounds.on_device:
            if not (agree and gathers_on_devices(group)):
                return 0
            key = transport.key(rounds.steps.step, 0, f"{_AGREEMENT}{phase}")
            with rounds.watched(key):
                able_of = gather_numbers(group, key, (2, inputs[0].shape[1]), able)
            are_able = able_of.min() > 0 and able_of.max() <= limits.MAX_REPLICAS
            rounds.on_device[transport.layer] = int(able_of.max()) if are_able else 0
        capacity = rounds.on_device[transport.layer]
    if capacity and not 0 < able <= capacity:
        raise ConfigurationError(
            f"layer {transport.layer!r}: expected up to {capacity} inputs on devices of this process, as in its first "
            f"call, got {len(inputs)} on {', '.join(sorted({str(x.device) for x in inputs}))}"
        )
    return capacity


def are_on_devices(inputs: Sequence[Tensor]) -> bool:
    """Whether all inputs are on devices where rows may stay."""
    return all(x.device.type in DEVICE_TYPES for x in inputs)


def gathers_on_devices(group: object) -> bool:
    """Whether a process group gathers rows on devices, as NCCL does."""
    kinds = [device for device in group._device_types if device.type in DEVICE_TYPES]  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
    return any(group._get_backend(kind).name() not in HOST_BACKENDS for kind in kinds)  # type: ignore[attr-defined]  # noqa: SLF001 - as above


def run(
    transport: Transport, local: LocalRows, capacity: int, key: RoundKey | None = None, phase: str = FORWARD
) -> DeviceAggregate:
    """Run a round on devices; see `Transport.run_slave`."""
    rows, mismatched = local.on_device(), None
    if isinstance(transport, ProcessGroupPipe):
        # The round's digest precedes each row. Rows that a rank lacks are -0, which changes no bit of the sum.
        message = rows.new_full((capacity, 1 + rows.shape[1]), -0.0)
        message[: len(rows), 1:].copy_(rows)
        digests = message.view(torch.int64)[:, 0]
        messages = rows.new_empty(nr_ranks(transport) * capacity, message.shape[1])

        def write(digest: int) -> tuple[Tensor, Tensor]:
            digests.fill_(digest)
            return message, messages

        key = run_row(transport, write, key, phase)
        rows, mismatched = messages[:, 1:], messages.view(torch.int64)[::capacity, 0] != digests[0]
    else:
        key = run_row(transport, lambda _: (rows, rows), key, phase)
    total = sum_rows(rows, local.values.shape[1:])
    return DeviceAggregate(key, *total, rows, ranks_of(transport), mismatched)


def run_row(transport: Transport, write: Write, key: RoundKey | None = None, phase: str = FORWARD) -> RoundKey:
    """Run a round with the message that `write` computes with the round's digest, and return the round's key."""
    if not isinstance(transport, ProcessGroupPipe):
        write(0)  # no other rank compares digests
        return key or transport.key(0, 0, phase)
    group = group_of(transport)
    rounds = rounds_of(group)
    with rounds.lock:
        key = transport.begin(rounds, key, phase)
        message, messages = write(c_int64(key_digest(key)).value)
        _all_gather(messages, message, group=group)
    return key


def nr_ranks(transport: Transport) -> int:
    """Number of ranks in the rounds of a transport on devices."""
    # `process_group.size` may be outdated: the size of the default group when the layer was converted.
    size: int = group_of(transport).size() if isinstance(transport, ProcessGroupPipe) else 1
    return size


def ranks_of(transport: Transport) -> list[int]:
    """Ranks in the rounds of a transport on devices, in order."""
    if isinstance(transport, ProcessGroupPipe):
        return distributed.get_process_group_ranks(group_of(transport))
    return [transport.rank]


def sum_rows(rows: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Add rows from first to last, as `statsd_bn.reduction` does; return the count and the values."""
    total, *others = rows.unbind()
    for row in others:
        total = total + row
    return total[0], total[1:].view(*shape)
