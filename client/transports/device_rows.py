"""Rows that stay on their device, where the transport can take them there.

Replicas of one process hand their rows from device to device, and ranks of a process group gather them by a backend
that works on devices, as NCCL does. They are added in the order of `statsd_bn.reduction`, so to the same bits. Nothing
here waits for a device: what is wrong with a round is a tensor too, and `client.ops.device_errors` reports it later.

Ranks that gather on devices must all do so, so the ranks of a process group agree over the host, once for each layer,
before its first round. That also tells ranks apart that come to different layers there, or with other channels. Later
rounds carry the digest of their key, by which each rank sees on its device that others have come to another round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from client.transports.in_process import LocalPipe
from client.transports.key_digest import digest_of
from client.transports.process_group import FIRST_ROW, ProcessGroupPipe, group_of, met, rounds_of, use_device
from client.transports.server import SlavePipe
from client.transports.transport import Transport
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from statsd_bn.reduction import FloatArray, Rows
from statsd_bn.round_key import FORWARD, RoundKey

# Devices that compute in float64, and copy to each other without the host.
TYPES = frozenset({"cuda"})

# Backends of torch's process groups that take tensors of a device only to bring them to the host.
OVER_THE_HOST = frozenset({"gloo", "mpi"})

# Since torch 2.13 it has another name.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

Count = int | Tensor
"""Values per channel, an exact integer: an int where the host knows it, else of shape (), float64."""


def to_host(values: Tensor) -> FloatArray:
    """Returns a float64 tensor as an array, which waits for its device."""
    if values.is_cuda:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        torch.cuda.current_stream(values.device).synchronize()
        values = host
    return values.numpy()


def from_host(values: FloatArray, device: torch.device) -> Tensor:
    """Returns a copy of an array on a device; the host does not wait for it."""
    copied = torch.from_numpy(np.array(values))
    return copied.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else copied


# The phase of the round in which the ranks agree is that of the forward round behind it, and this before it.
FIRST = "first "


@dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """What the replicas of this process bring to a round, a row each.

    Attributes:
        counts: of each, an int where the host knows it.
        values: shape (replicas, vectors, C), float64, on the device of the first one.
    """

    counts: Sequence[Count]
    values: Tensor

    @classmethod
    def of(cls, counts: Sequence[Count], values: Sequence[Tensor]) -> "LocalRows":
        """Brings together what replicas have on devices of their own; the host does not wait for the copies."""
        lead = values[0].device
        return cls(counts, torch.stack([vectors.to(lead, non_blocking=True) for vectors in values]))

    def on_device(self) -> Tensor:
        """Returns the rows as they travel from device to device, shape (replicas, 1 + vectors * C): the count first."""
        lead = self.values.device
        column = [
            torch.full((), count, dtype=torch.float64, device=lead)
            if isinstance(count, int)
            else count.to(lead, non_blocking=True)
            for count in self.counts
        ]
        return torch.cat((torch.stack(column).unsqueeze(1), self.values.flatten(1)), 1)

    def on_host(self) -> Rows:
        """Returns the rows as they travel over the host, which waits for the device."""
        return Rows(tuple(map(int, self.counts)), to_host(self.values))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAggregate:
    """The sum of all rows of a round.

    Attributes:
        key: of the round.
        count: shape ().
        values: shape (vectors, C).
        rows: what it is the sum of, shape (rows, 1 + vectors * C): the count, then the values.
        ranks: whose rows these are, in their order; each has the same number of rows.
        others: which ranks have come to another round, shape (ranks,), bool; None where none can.
    """

    key: RoundKey
    count: Tensor
    values: Tensor
    rows: Tensor
    ranks: list[int]
    others: Tensor | None = None


def may_stay(transport: Transport, x: Tensor) -> bool:
    """Whether `capacity_of` has to be asked; most calls on a CPU need not, and this takes no time."""
    return x.device.type in TYPES or isinstance(transport, ProcessGroupPipe)


def capacity_of(
    transport: Transport, inputs: Sequence[Tensor], phase: str = FORWARD, *, over_the_host: bool = False
) -> int:
    """Returns how many rows each rank brings to a layer's rounds on its device; 0 where rows go over the host.

    Ranks of a process group agree on it in the first call of each layer.

    Args:
        transport: of the layer.
        inputs: of the replicas of this process.
        phase: of the layer's forward round.
        over_the_host: whether the rows of this call go over the host in any case, on all ranks.

    Raises:
        RoundMismatch: on all ranks: they have come for different rounds.
        ConfigurationError: the ranks have agreed to something else than this call brings.
    """
    if isinstance(transport, LocalPipe):
        return len(inputs) if are_on_devices(inputs) and not over_the_host else 0
    if isinstance(transport, SlavePipe) and transport.group is None:
        transport.connection.of_all.is_on_devices = are_on_devices(inputs)  # for the agreement behind the first round
    if not isinstance(transport, ProcessGroupPipe):
        return 0
    group = group_of(transport)
    rounds = rounds_of(group)
    if not rounds.on_device.get(transport.layer):
        use_device(group, inputs[0].device)
    if over_the_host:
        return 0
    with rounds.lock:
        if transport.layer not in rounds.on_device:
            if not gathers_on_devices(group):
                return 0
            able = len(inputs) if are_on_devices(inputs) else 0
            key = transport.key(rounds.steps.step, 0, f"{FIRST}{phase}")
            first = np.array([able], np.int64)
            with rounds.watched(key):
                told = met(group, key, (2, inputs[0].shape[1]), 1, first)[:, FIRST_ROW]
            rounds.on_device[transport.layer] = (
                int(told.max()) if 0 < told.min() <= told.max() <= limits.MAX_REPLICAS else 0
            )
        capacity = rounds.on_device[transport.layer]
    if capacity and (len(inputs) > capacity or not are_on_devices(inputs)):
        raise ConfigurationError(
            f"layer {transport.layer!r}: expected up to {capacity} inputs on devices of this process, as in its first "
            f"call, got {len(inputs)} on {', '.join(sorted({str(x.device) for x in inputs}))}"
        )
    return capacity


def stay(transport: Transport, inputs: Sequence[Tensor]) -> bool:
    """Whether the rows of an earlier call with such inputs have stayed on their devices; asks nobody."""
    if isinstance(transport, LocalPipe):
        return are_on_devices(inputs)
    if not isinstance(transport, ProcessGroupPipe):
        return False
    return rounds_of(group_of(transport)).on_device.get(transport.layer, 0) > 0


def are_on_devices(inputs: Sequence[Tensor]) -> bool:
    """Whether all inputs are on devices whose rows may stay there."""
    return all(x.device.type in TYPES for x in inputs)


def gathers_on_devices(group: object) -> bool:
    """Whether a process group gathers rows on devices, as NCCL does."""
    kinds = [device for device in group._device_types if device.type in TYPES]  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
    return any(group._get_backend(kind).name() not in OVER_THE_HOST for kind in kinds)  # type: ignore[attr-defined]  # noqa: SLF001 - as above


def run(
    transport: Transport, brought: LocalRows, capacity: int, key: RoundKey | None = None, phase: str = FORWARD
) -> DeviceAggregate:
    """Takes part in a round and returns its aggregate; see `Transport.run_slave`.

    Args:
        transport: for which there is a capacity.
        brought: this process's rows.
        capacity: as `capacity_of` has returned it.
        key: of the round; None for the layer's next forward round.
        phase: of that forward round.
    """
    shape = brought.values.shape[1:]
    rows = brought.on_device()
    if not isinstance(transport, ProcessGroupPipe):
        key = key or transport.key(0, 0, phase)
        return DeviceAggregate(key, *total(rows, shape), rows, [transport.rank])
    group = group_of(transport)
    rounds = rounds_of(group)
    with rounds.lock:
        key = rounds.begin_on_devices(transport, key, phase)
        rows, others = _gathered(group, rows, capacity, key)
    return DeviceAggregate(key, *total(rows, shape), rows, distributed.get_process_group_ranks(group), others)


def run_row(
    transport: Transport,
    write: Callable[[int], tuple[Tensor, Tensor]],
    key: RoundKey | None = None,
    phase: str = FORWARD,
) -> RoundKey:
    """Takes part in a round with one row, in the form in which `run` sends rows, and returns the round's key.

    Args:
        transport: for which there is a capacity of 1.
        write: writes the row, given the digest of the round's key. It returns the row, shape (2 + vectors * C,), and
            where those of all ranks go, shape (ranks * (2 + vectors * C),): float64.
        key: as for `run`.
        phase: likewise.
    """
    if not isinstance(transport, ProcessGroupPipe):
        key = key or transport.key(0, 0, phase)
        write(_digest(key))
        return key
    group = group_of(transport)
    rounds = rounds_of(group)
    with rounds.lock:
        key = rounds.begin_on_devices(transport, key, phase)
        row, everybodys = write(_digest(key))
        _all_gather(everybodys, row, group=group)
    return key


def nr_ranks(transport: Transport) -> int:
    """Returns how many ranks bring rows to the rounds of a transport."""
    return transport.process_group.size if isinstance(transport, ProcessGroupPipe) else 1


def ranks_of(transport: Transport) -> list[int]:
    """Returns which ranks these are, in their order."""
    if isinstance(transport, ProcessGroupPipe):
        return distributed.get_process_group_ranks(group_of(transport))
    return [transport.rank]


def _digest(key: RoundKey) -> int:
    """Returns the digest as a signed number."""
    digest = digest_of(key)
    return digest - (1 << 64) if digest >> 63 else digest


def total(rows: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Adds rows from first to last, as `statsd_bn.reduction` does; returns the count and the values."""
    found, *others = rows.unbind()
    for row in others:
        found = found + row
    return found[0], found[1:].view(*shape)


def _gathered(group: object, rows: Tensor, capacity: int, key: RoundKey) -> tuple[Tensor, Tensor]:
    """Returns the rows of all ranks, and which ranks have come to another round.

    A rank with fewer rows than others fills up with -0, which changes no bit of a sum.
    """
    size: int = group.size()  # type: ignore[attr-defined]
    digest = _digest(key)
    message = torch.full((capacity, 1 + rows.shape[1]), -0.0, dtype=torch.float64, device=rows.device)
    message[: len(rows), 1:].copy_(rows)
    message.view(torch.int64)[:, 0].fill_(digest)
    everybodys = torch.empty(size * message.numel(), dtype=torch.float64, device=rows.device)
    _all_gather(everybodys, message.view(-1), group=group)
    found = everybodys.view(size * capacity, -1)
    return found[:, 1:], found.view(torch.int64)[::capacity, 0] != digest
