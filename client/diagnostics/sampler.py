"""Samples of the main thread: its position as one short line, and the collective of torch in which it is blocked.

    torch/nn/parallel/distributed.py:2425 _sync_buffers, called from train.py:57 main

The line names the collective's frame, or else the innermost one, then the innermost frame of the user's code; in a call
of this package only the user's frame. Each frame has file, line and function: never a value or source code.
"""

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from client.diagnostics import collectives
from client.diagnostics.collectives import Collective, TorchGroup, frames, module_of
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import StackReport
from statsd_bn.text import escape

SAMPLE_SECONDS = 0.03  # duration of the first sample: a thread that computes uses processor time in it
IDLE_SHARE = 0.2  # the share of a core that an idle process may use, for sampling and ZeroMQ's threads

_OUR_MODULES = ("client.", "statsd_bn.")  # the server knows which of our calls a thread is in
_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"

_MAX_FILE_LETTERS, _MAX_NAME_LETTERS = 200, 100


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """The state of the main thread at one moment."""

    stack: str  # empty if stacks are not reported
    collective: Collective | None = None  # in which the thread is blocked; None if it is in none, or may be computing
    torch_group: TorchGroup | None = None  # the requested process group, or else the collective's
    kind: str = ""  # of the collective, one of those in `statsd_bn.messages`
    is_in_call: bool = False  # whether the thread is in one of this package's calls, which the server sees

    def report(self, token: bytes, number: int) -> StackReport:
        """Returns the reply to stack request `number` of the session with this token."""
        group = self.torch_group or TorchGroup("", (), 0)
        is_blocked = int(self.collective is not None)
        ranks = Members.of(group.ranks)
        return StackReport(token, number, self.stack, is_blocked, group.name, ranks, group.launched, self.kind)


class ThreadSampler:
    """Samples the main thread; samples contain torch's groups only if ranks in torch and in the job are equal.

    Most positions show whether the thread is blocked in a collective. In a backward pass and a few others, see
    `collectives.may_compute`, the thread, other threads or a device may be computing. There it counts as blocked only
    if, since the previous sample (the first takes `SAMPLE_SECONDS`), it used no processor time and the process little.
    """

    def __init__(self, *, reports_stacks: bool, rank: int, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self._reports_stacks = reports_stacks
        self._rank = rank
        self._thread_time: int | None = None
        self._process_time = (0.0, 0.0)

    def sample(self, torch_group: str = "") -> ThreadSample:
        """Samples the main thread; `torch_group` names the process group to report, default the collective's."""
        innermost = main_frame()
        collective = collectives.current(innermost)
        if collective and innermost and collectives.may_compute(innermost) and not self._is_thread_idle():
            collective = None
        frame, group = (collective.frame, collective.group) if collective else (None, None)
        if torch_group:
            group = next((each for each in collectives.groups() if each.name == torch_group), None)
        if collectives.rank_in_torch() != self._rank:
            group = None
        text = format_stack(innermost, frame) if self._reports_stacks else ""
        kind = collective.kind if collective and group and group.counts_all else ""
        return ThreadSample(text, collective, group, kind, is_in_call(innermost))

    def nccl_progress(self) -> tuple[object, ...] | None:
        """Returns the main thread's stack and the progress of unfinished NCCL operations; None if all have completed.

        Two equal results mean no progress in between. A host thread that waits for a device, as in `loss.item()`, may
        spin, so its processor time does not show the wait.
        """
        operations = collectives.unfinished_operations()
        if not operations:
            return None
        return operations, *((id(frame), frame.f_lasti) for frame in frames(main_frame()))

    def _is_thread_idle(self) -> bool:
        previous, self._thread_time = self._thread_time, collectives.main_thread_time()
        (busy, at), self._process_time = self._process_time, (time.process_time(), time.monotonic())
        is_process_idle = self._process_time[0] - busy <= IDLE_SHARE * (self._process_time[1] - at)
        if previous is None and self._thread_time is not None:
            self._pause(SAMPLE_SECONDS)
            return self._is_thread_idle()
        return is_process_idle and previous is not None and previous == self._thread_time


def main_frame() -> FrameType | None:
    """Returns the innermost frame of the main thread; None if it has none."""
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the only way to another thread


def is_in_call(innermost: FrameType | None) -> bool:
    """Whether a thread is in a call of this package, or in a library other than torch that this package called."""
    for frame in frames(innermost):
        if _is_ours(frame):
            return True
        if module_of(frame).startswith("torch.") or _is_users(frame):
            return False
    return False


def format_stack(innermost: FrameType | None, collective: FrameType | None = None) -> str:
    """Returns a thread's position; empty if it is unknown. The frame of a collective replaces the innermost one."""
    user = next((frame for frame in frames(innermost) if _is_users(frame)), None)
    # In a call of this package only the user's line is useful: torch's frames in between merely call a layer.
    inside = user if user and is_in_call(innermost) else collective or innermost
    if inside is None:
        return ""
    shown = [inside] if user is None or user is inside else [inside, user]
    text = escape(", called from ".join(map(_format_frame, shown)))
    return text.encode(errors="replace")[: limits.MAX_STACK_BYTES].decode(errors="ignore")


def short_path(file: str) -> str:
    """Returns a library file's path from the package's folder on, and only the name of any other file."""
    return _path_in_library(file) or file.replace("\\", "/").rpartition("/")[2]


def _path_in_library(file: str) -> str:
    path = file.replace("\\", "/")
    for folder in _LIBRARY_FOLDERS:
        if folder in path:
            return path.rpartition(folder)[2]
    return path.removeprefix(_STANDARD_LIBRARY) if path.startswith(_STANDARD_LIBRARY) else ""


def _is_ours(frame: FrameType) -> bool:
    return module_of(frame).startswith(_OUR_MODULES)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    # "<...>": generated code, as by torch.compile.
    is_library = file.startswith("<") or _path_in_library(file) or module_of(frame).startswith("torch.")
    return not (is_library or _is_ours(frame))


def _format_frame(frame: FrameType) -> str:
    file = short_path(frame.f_code.co_filename)[-_MAX_FILE_LETTERS:]
    # A frame between two lines has no line number.
    return f"{file}:{frame.f_lineno or 0} {frame.f_code.co_name[:_MAX_NAME_LETTERS]}"
