"""Errors of rounds on a device, reported without waiting for the device.

The device computes flags, and the count of a failed round becomes NaN: its results are NaN and update no running
statistics. The flags are copied to pinned memory, followed by an event, and a later call that finds the event complete
raises the error. On a CPU the error is raised at once.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from client.ops import non_finite
from client.transports import process_group
from client.transports.device_rows import DeviceAggregate, LocalRows
from client.transports.process_group import ProcessGroupPipe
from client.transports.transport import Transport
from statsd_bn.errors import ConfigurationError
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.text import wrap

Flags = npt.NDArray[Any]

# Bits in the flags of Triton's kernels: the first two in each row's flag, the last in the flag of the whole batch.
OTHER_ROUND, NOT_FINITE, TOO_FEW = 1, 2, 4


class Slot:
    """A reusable buffer on the host for the flags that a device computes in one round."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._device = device
        self._buffer = torch.empty(size, dtype=dtype, pin_memory=self._event is not None)
        self.flags: Flags = self._buffer.numpy()

    def fill(self, flags: Tensor) -> None:
        """Copy flags asynchronously."""
        self._buffer.copy_(flags, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def is_filled(self) -> bool:
        """Whether the copy is complete."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()


class AsyncChecks:
    """The flags that have not been checked yet, in the order of their rounds."""

    def __init__(self) -> None:
        self._open: deque[tuple[Slot, Any, Callable[[Flags], None]]] = deque()
        self._free: defaultdict[tuple[int, torch.device, torch.dtype], list[Slot]] = defaultdict(list)
        self._lock = threading.Lock()

    def submit(self, flags: Tensor, report: Callable[[Flags], None], *, wait: bool = False) -> None:
        """Call `report`, which logs or raises errors, when a set flag arrives; `wait` for these and earlier flags."""
        if _is_captured(flags.device):  # a CUDA graph would replay the copy without the report
            return
        kind = len(flags), flags.device, flags.dtype
        with self._lock:
            slot = self._free[kind].pop() if self._free[kind] else None
        slot = slot or Slot(*kind)
        slot.fill(flags)
        with self._lock:
            self._open.append((slot, kind, report))
            awaited = [open_slot for open_slot, *_ in self._open] if wait else []
        # Wait without the lock: if one thread waited with it, two threads could deadlock through another rank.
        for open_slot in awaited:
            open_slot.wait()
        # A CUDA device has not computed the flags yet; the next call polls first.
        if wait or flags.device.type != "cuda":
            self.poll(flags.device)

    def poll(self, device: torch.device) -> None:
        """Report flags that have arrived; called before each round, so a rank that raises does not join the round."""
        while self._open and not _is_captured(device):
            with self._lock:
                if not self._open or not self._open[0][0].is_filled():
                    return
                slot, kind, report = self._open.popleft()
                flags = slot.flags.copy() if np.count_nonzero(slot.flags) else None
                self._free[kind].append(slot)
            if flags is not None:
                report(flags)


def _is_captured(device: torch.device) -> bool:
    """Whether this thread's work on a device is captured; torch answers for the current device only."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


async_checks = AsyncChecks()


class TooFewValues(NamedTuple):
    """A check that the whole batch has more than one value per channel."""

    flag: Tensor  # whether the batch has too few values, shape (), bool; Triton's calls do not use this field
    layer: str
    shape: tuple[int, ...]  # of this replica's input


@dataclass(frozen=True, slots=True, eq=False)
class DeviceErrors:
    """The possible errors of one round."""

    transport: Transport
    contribution: LocalRows
    aggregate: DeviceAggregate
    too_few: TooFewValues | None = None  # None where the whole batch certainly has enough values

    def submit(self) -> Tensor | None:
        """Schedule the checks of the round; return whether it has failed, shape (), bool; None where it cannot fail."""
        flags, failed = [], None
        if self.aggregate.mismatched is not None:
            flags, failed = [self.aggregate.mismatched], self.aggregate.mismatched.any()
        if self.too_few is not None:
            flags.append(self.too_few.flag.unsqueeze(0))
            failed = self.too_few.flag if failed is None else failed | self.too_few.flag
        if non_finite.is_awaited(self.transport):
            flags.append((self.aggregate.rows * 0).sum(1) != 0)  # infinity * 0 is NaN, and NaN != 0
        if flags:
            wait = non_finite.raises(self.transport, self.aggregate.key)
            async_checks.submit(torch.cat(flags) if len(flags) > 1 else flags[0], self._report_flags, wait=wait)
        return failed

    def _report_flags(self, flags: Flags) -> None:
        nr_ranks = 0 if self.aggregate.mismatched is None else len(self.aggregate.ranks)
        self._report(*np.split(flags, (nr_ranks, nr_ranks + (self.too_few is not None))))

    def report_rows(self, flags: Flags, blocks: int) -> None:
        """Report the errors in Triton's flags: for each row, then for the batch, a number per block of channels."""
        of_rows = np.bitwise_or.reduce(flags.astype(np.int64).reshape(-1, blocks), axis=1)
        rows, whole = np.split(of_rows, (len(self.aggregate.ranks),))
        not_finite = rows & (NOT_FINITE if non_finite.is_awaited(self.transport) else 0)
        self._report(rows & OTHER_ROUND != 0, whole & TOO_FEW, not_finite != 0)

    def _report(self, others: Flags, too_few: Flags, not_finite: Flags) -> None:
        """Report the errors in flags of the ranks, of the whole batch, and of the rows; `too_few` may be empty."""
        if others.any():
            key, ranks = self.aggregate.key, np.array(self.aggregate.ranks)
            ranks_in = (f"in {key.describe()}", ranks[~others].tolist()), ("in another round", ranks[others].tolist())
            where = "torch's process group, on devices; results computed since then are NaN"
            raise process_group.mismatch(key, ranks_in, where)
        if self.too_few is not None and too_few.any():
            raise too_few_values(self.too_few.layer, int(self.aggregate.count), self.too_few.shape)
        if not_finite.any():
            self._report_non_finite(not_finite)

    def _report_non_finite(self, rows: Flags) -> None:
        """Report NaN and infinity like a round over the host. The device has finished the round, so copies are fast."""
        result, ranks = self.aggregate, self.aggregate.ranks
        senders = Members.of(map(int, np.repeat(ranks, len(rows) // len(ranks))[rows]))
        count, values = int(result.count.nan_to_num(0.0)), result.values.cpu().numpy()
        aggregate = Aggregate(result.key, len(rows), count, Members.of(ranks), values, non_finite=senders)
        if isinstance(self.transport, ProcessGroupPipe):
            process_group.report_non_finite(self.transport, aggregate)
        non_finite.check(self.transport, self.contribution.on_host(), aggregate)


def check_recomputation(layer: str, first: Tensor, again: Tensor, tolerance: float) -> None:
    """Schedule a check that a recomputed call has the moments, (2, C), of the call that it was matched with."""
    first, again = first.nan_to_num(), again.to(first.device, non_blocking=True).nan_to_num()
    differs = (first - again).abs().amax(1) > tolerance * first.abs().amax(1)

    def report(_: Flags) -> None:
        raise ConfigurationError(
            f"layer {layer!r}: called during a backward pass with an input that no checkpointed forward had; call the "
            "layer outside of the backward pass"
        )

    async_checks.submit(differs, report)


def too_few_values(layer: str, count: int, shape: tuple[int, ...]) -> ValueError:
    """The error for a whole batch with too few values per channel."""
    problem = f"expected more than 1 value per channel over all replicas when training, got {count}"
    return ValueError(wrap(f"layer {layer!r}: {problem} (this replica's input has shape {shape})"))
