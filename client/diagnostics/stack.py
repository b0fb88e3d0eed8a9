"""Stack: where a thread of this process is, in one short line for people.

    torch/nn/parallel/distributed.py:2425 _sync_buffers, called from train.py:57 main

Of all frames it tells the one that the thread is in, leaving out ours, and the nearest one of the user's own code. A
frame is told as its file, from the package's folder on, its line and its function: never a value or a line of source.
"""

import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType

from statsd_bn import limits
from statsd_bn.text import plain

# Modules of this package: a thread that is in one of them is in a call of ours, which the server knows of.
_OURS = ("client.", "statsd_bn.")

# What lies below one of these is a library, and nobody's own script.
_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"

# Deeper than this nobody's own code is looked for.
_DEEPEST = 200

_FILE_LETTERS, _NAME_LETTERS = 200, 100


def main_frame() -> FrameType | None:
    """Returns the frame that the main thread is in; None where it has none."""
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the only way to another thread


def frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those that called it."""
    frame = innermost
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Returns the name of the module that a frame's code is of."""
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is in a call of this package."""
    return module_of(frame).startswith(_OURS)


def is_in_call(innermost: FrameType | None) -> bool:
    """Whether a thread is in a call of this package, perhaps in what that calls of other libraries."""
    for frame in frames(innermost):
        if is_ours(frame):
            return True
        if module_of(frame).startswith("torch.") or _is_users(frame):
            return False
    return False


def told(innermost: FrameType | None, in_place_of: FrameType | None = None) -> str:
    """Returns where a thread is, in bounded length; empty where nothing is known."""
    user = next((frame for frame in frames(innermost) if _is_users(frame)), None)
    # Of a thread that is in a call of ours, the user's line says all: between are torch's ways to call a layer.
    inside = user if user and is_in_call(innermost) else in_place_of or innermost
    if inside is None:
        return ""
    if user is None or user is inside:
        return _cut(_line(inside))
    return _cut(f"{_line(inside)}, called from {_line(user)}")


def shortened(file: str) -> str:
    """Returns a file's path from the package's folder on; of one that is in no library only its name."""
    return _in_library(file) or file.replace("\\", "/").rpartition("/")[2]


def _in_library(file: str) -> str:
    """A file's path within a library; empty if it is in none."""
    path = file.replace("\\", "/")
    for folder in _LIBRARY_FOLDERS:
        if folder in path:
            return path.rpartition(folder)[2]
    return path.removeprefix(_STANDARD_LIBRARY) if path.startswith(_STANDARD_LIBRARY) else ""


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    # What has no file was made while the program runs, as by torch.compile.
    return not (is_ours(frame) or file.startswith("<") or _in_library(file) or module_of(frame).startswith("torch."))


def _line(frame: FrameType) -> str:
    # A frame that is between two lines has none.
    file = shortened(frame.f_code.co_filename)[-_FILE_LETTERS:]
    return f"{file}:{frame.f_lineno or 0} {frame.f_code.co_name[:_NAME_LETTERS]}"


def _cut(text: str) -> str:
    return plain(text).encode(errors="replace")[: limits.MAX_STACK_BYTES].decode(errors="ignore")
