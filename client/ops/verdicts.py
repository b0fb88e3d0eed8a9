"""Verdicts: what a device has found out about a round, looked at when it is there, and never waited for.

A host that asks a device for a value waits until the device has come so far, and cannot run ahead of it. So flags are
copied to the host in passing, with an event behind them, and a later call looks whether the event has come. What is
wrong is then said a call or more late. On a CPU it is said at once.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Flags = npt.NDArray[Any]


class Slot:
    """Room on the host for the flags of one round; it is used again.

    Args:
        size: how many flags.
        device: where they come from.
        dtype: their type.
    """

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._device = device
        self._room = torch.empty(size, dtype=dtype, pin_memory=self._event is not None)
        self.flags: Flags = self._room.numpy()

    def fill(self, flags: Tensor) -> None:
        """Copies flags here; the host does not wait for it."""
        self._room.copy_(flags, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def is_filled(self) -> bool:
        """Whether the copy is there."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Waits until the copy is there."""
        if self._event is not None:
            self._event.synchronize()


class Verdicts:
    """The flags that nobody has looked at yet, in the order of their rounds."""

    def __init__(self) -> None:
        self._open: deque[tuple[Slot, Any, Callable[[Flags], None]]] = deque()
        self._free: defaultdict[tuple[int, torch.device, torch.dtype], list[Slot]] = defaultdict(list)
        self._lock = threading.Lock()

    def hand_in(self, flags: Tensor, tell: Callable[[Flags], None], *, at_once: bool = False) -> None:
        """Keeps the flags of a round for later; while a CUDA graph is captured nobody could look, so none are kept.

        Args:
            flags: shape (flags,); 0 or False where nothing is wrong.
            tell: what says it, if one of them is set.
            at_once: wait here for them, and for all before them.
        """
        if _is_captured(flags.device):
            return
        kind = len(flags), flags.device, flags.dtype
        with self._lock:
            slot = self._free[kind].pop() if self._free[kind] else None
        slot = slot or Slot(*kind)
        slot.fill(flags)
        with self._lock:
            self._open.append((slot, kind, tell))
            awaited = [open_slot for open_slot, *_ in self._open] if at_once else []
        # Without the lock: two threads may wait for each other there, by way of another rank.
        for open_slot in awaited:
            open_slot.wait()
        # A device has not come so far yet, and the next call looks first.
        if at_once or flags.device.type != "cuda":
            self.look(flags.device)

    def look(self, device: torch.device) -> None:
        """Says what has come; called before something goes to the device, so that nobody waits there in vain.

        Raises:
            whatever a `tell` raises.
        """
        while self._open and not _is_captured(device):
            with self._lock:
                if not self._open or not self._open[0][0].is_filled():
                    return
                slot, kind, tell = self._open.popleft()
                found = slot.flags.copy() if np.count_nonzero(slot.flags) else None
                self._free[kind].append(slot)
            if found is not None:
                tell(found)


def _is_captured(device: torch.device) -> bool:
    """Whether this thread's work on a device is captured; torch answers for the current device only."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
