"""Look: one look at where this process is, as it is told to the server."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from client.diagnostics import collectives, stack
from client.diagnostics.collectives import Collective
from client.diagnostics.place import Place

# A thread that computes takes processor time within this.
SAMPLE_SECONDS = 0.03

# The most of a core that a process takes whose threads all wait; the one that looks, and ZeroMQ's, run now and then.
IDLE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Look:
    """Where the main thread is.

    Attributes:
        collective: the collective of torch that it waits in; None if it is in none, or computes.
        is_in_call: whether the main thread is in a call of ours, which the server knows of.
    """

    place: Place
    collective: Collective | None
    is_in_call: bool


class Looks:
    """Looks at the main thread, one after the other.

    A thread in autograd's engine, or in the like, may compute there, or have other threads compute, as on CUDA, or wait
    for other ranks. It waits if it has taken no processor time since the look before, the first time for a short while,
    and the whole process next to none.

    Args:
        rank: this process's rank in its job. torch's ranks are told only if they are the job's.
    """

    def __init__(self, *, tells_stacks: bool, rank: int, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self._tells_stacks = tells_stacks
        self._rank = rank
        self._run_time: int | None = None
        self._process_time = (0.0, 0.0)

    def look(self, torch_group: str = "") -> Look:
        """Looks at the main thread."""
        innermost = stack.main_frame()
        collective = collectives.current(innermost)
        if collective and innermost and collectives.may_compute(innermost) and not self._is_still():
            collective = None
        group = collective.group if collective else None
        if torch_group:
            group = collectives.group_named(torch_group)
        told = stack.told(innermost, collective.frame if collective else None) if self._tells_stacks else ""
        if collectives.rank_in_torch() != self._rank:
            group = None
        kind = collectives.kind_of(collective) if collective and group and group.counts_all else ""
        place = Place(told, collective is not None, group, kind)
        return Look(place, collective, stack.is_in_call(innermost))

    def standstill(self) -> tuple[object, ...] | None:
        """Returns the main thread's stack and the progress of NCCL's unfinished operations; None if all have completed.

        Equal results mean no progress. A host that waits for a device is not in a collective, but in `loss.item()` or
        another call of C. It may spin there, so its processor time does not show whether it waits.
        """
        operations = collectives.unfinished()
        if not operations:
            return None
        return operations, *((id(frame), frame.f_lasti) for frame in stack.frames(stack.main_frame()))

    def _is_still(self) -> bool:
        before, self._run_time = self._run_time, collectives.run_time()
        is_idle = self._is_idle()
        if before is None and self._run_time is not None:
            self._pause(SAMPLE_SECONDS)
            before, self._run_time = self._run_time, collectives.run_time()
            is_idle = self._is_idle()
        return is_idle and before is not None and before == self._run_time

    def _is_idle(self) -> bool:
        """Whether the process has taken next to no processor time since the last call."""
        (busy, at), self._process_time = self._process_time, (time.process_time(), time.monotonic())
        now_busy, now = self._process_time
        return now_busy - busy <= IDLE_SHARE * (now - at)
