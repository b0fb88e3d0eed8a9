"""Tracebacks of errors that a public function raises: they show the user's code and one frame of ours.

To debug statsd_bn itself, set STATSD_BN_TRACEBACK=full.
"""

import functools
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from statsd_bn.errors import StatsdBNError

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

_OURS = ("client.", "statsd_bn.", "concurrent.futures.")  # futures re-raise errors of other threads
# A cause is internal if all its frames are in these packages or in the standard library, not in torch or user code.
_INSIDE = {"client", "statsd_bn", "zmq"}
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"


def hide_internal_frames(error: StatsdBNError, *, for_caller: bool = False) -> None:
    """Hide all our frames except the first in an error's traceback, and add a note with the error's documentation page.

    `for_caller` hides the first frame too: Python then adds the frame of the caller, another function of ours.
    """
    note = f"see docs/errors.md#{type(error).__name__.lower()}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    if os.environ.get("STATSD_BN_TRACEBACK", "").lower() != "full":
        frames = list(_frames(error.__traceback__))
        first = None if for_caller else next((frame for frame in frames if _is_ours(frame.tb_frame)), None)
        shown: TracebackType | None = None
        for frame in reversed(frames):
            if frame is first or not _is_ours(frame.tb_frame):
                shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = shown
        # An internal cause adds nothing to the error. A cause that was raised by a user's code or a model stays.
        if error.__cause__ is not None and all(map(_is_inside, _frames(error.__cause__.__traceback__))):
            error.__cause__ = None


def api_boundary(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Hide internal frames in the errors of a public function; too slow for functions that are called in each round."""

    @functools.wraps(function)
    def with_hidden_frames(*arguments: ParamsT.args, **named: ParamsT.kwargs) -> ResultT:
        try:
            return function(*arguments, **named)
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise

    return with_hidden_frames


def warn(text: str) -> None:
    """Issue a UserWarning at the line of the user's code that called us, whatever the number of our frames."""
    frame, level = sys._getframe(), 1  # noqa: SLF001 - `warnings` uses it too
    while _is_ours(frame) and frame.f_back:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace:
        yield trace
        trace = trace.tb_next


def _is_ours(frame: FrameType) -> bool:
    return _module_of(frame).startswith(_OURS)


def _is_inside(trace: TracebackType) -> bool:
    package, file = _module_of(trace.tb_frame).partition(".")[0], trace.tb_frame.f_code.co_filename
    # Check the file too: a user's module may have the name of a standard module, such as `sched`.
    return package in _INSIDE or (package in sys.stdlib_module_names and file.startswith(_STANDARD_LIBRARY))


def _module_of(frame: FrameType) -> str:
    """The module of a frame; compiled functions of pyzmq may have no globals, but their name contains the module."""
    return str(frame.f_globals.get("__name__", frame.f_code.co_name))
