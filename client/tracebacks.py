"""Tracebacks of errors that a public function raises: they show the user's code and one frame of ours.

To debug statsd_bn itself, set STATSD_BN_TRACEBACK=full.
"""

import functools
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from statsd_bn.errors import StatsdBNError

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

_PACKAGES = Path(__file__).parents[1]
_HIDDEN = tuple(f"{folder}{os.sep}" for folder in (_PACKAGES / "client", _PACKAGES / "statsd_bn"))
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = f"-packages{os.sep}"
_FUTURES = f"{os.sep}concurrent{os.sep}futures{os.sep}"  # they raise errors of other threads again


def hide_internal_frames(error: StatsdBNError, *, for_caller: bool = False) -> None:
    """Hide our frames but the first in an error's traceback, and add a note with its page of the documentation.

    `for_caller` hides the first one too, because the function that raises the error again adds its own.
    """
    note = f"see docs/errors.md#{type(error).__name__.lower()}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    if os.environ.get("STATSD_BN_TRACEBACK", "").lower() != "full":
        frames = list(_frames(error.__traceback__))
        first = None if for_caller else next(filter(_is_ours, frames), None)
        shown: TracebackType | None = None
        for frame in reversed(frames):
            if frame is first or not _is_ours(frame):
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


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace:
        yield trace
        trace = trace.tb_next


def _is_inside(trace: TracebackType) -> bool:
    """Whether a frame is in our code or in the libraries that it calls: the standard library and pyzmq."""
    frame, file = trace.tb_frame, trace.tb_frame.f_code.co_filename
    # Compiled functions of pyzmq have no file. Their module is in their name; they may have no globals.
    names = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if _is_ours(trace) or any(name.startswith("zmq.") for name in names):
        return True
    return file.startswith(_STANDARD_LIBRARY) and _INSTALLED not in file


def _is_ours(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_HIDDEN) or _FUTURES in file
