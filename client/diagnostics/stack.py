"""The position of a thread of this process as one short line.

    torch/nn/parallel/distributed.py:2425 _sync_buffers, called from train.py:57 main

The line names the innermost frame outside of this package, and the innermost one of the user's own code, each by file,
line and function: never a value or source code.
"""

import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType

from statsd_bn import limits
from statsd_bn.text import escape

_OUR_MODULES = ("client.", "statsd_bn.")  # the server knows which of our calls a thread is in
_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"

_MAX_DEPTH = 200  # the number of frames that are searched for the user's code

_MAX_FILE_LETTERS, _MAX_NAME_LETTERS = 200, 100


def main_frame() -> FrameType | None:
    """Returns the innermost frame of the main thread; None if it has none."""
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the only way to another thread


def frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and its callers, innermost first."""
    frame = innermost
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Returns the name of the module that defines a frame's function."""
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def is_in_call(innermost: FrameType | None) -> bool:
    """Whether a thread is in a call of this package, or of another library on this package's behalf."""
    for frame in frames(innermost):
        if _is_ours(frame):
            return True
        if module_of(frame).startswith("torch.") or _is_users(frame):
            return False
    return False


def format_stack(innermost: FrameType | None, collective: FrameType | None = None) -> str:
    """Returns a thread's position in at most `limits.MAX_STACK_BYTES`; empty if it is unknown.

    The line names the frame of a collective in place of the innermost one, if it is given.
    """
    user = next((frame for frame in frames(innermost) if _is_users(frame)), None)
    # In a call of this package only the user's line is useful: torch's frames between merely call a layer.
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
