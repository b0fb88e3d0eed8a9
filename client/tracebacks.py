"""Border: where an error of ours leaves for the user's code.

Whoever reads a traceback looks for their own line, and below it for what happened; how a frame travels in between tells
them nothing. So the public functions raise again what comes from inside, without the frames that it passed. Only one of
ours remains below the user's line. Whoever looks for a fault in here sets STATSD_BN_TRACEBACK=full.
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

# Of the packages beside this one, and of the standard library's futures, in which an error passes between threads.
_PACKAGES = Path(__file__).parents[1]
_HIDDEN = tuple(f"{folder}{os.sep}" for folder in (_PACKAGES / "client", _PACKAGES / "statsd_bn"))
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = f"-packages{os.sep}"
_FUTURES = f"{os.sep}concurrent{os.sep}futures{os.sep}"


def hide_internal_frames(error: StatsdBNError, *, for_caller: bool = False) -> None:
    """Hides our frames but the first of an error that is about to be raised again, and adds where to read about it.

    Args:
        error: raised again just after, by a bare `raise`.
        for_caller: hide the first as well, because a public function of ours is the caller, which is seen anyway.
    """
    note = f"see docs/errors.md#{type(error).__name__.lower()}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    if os.environ.get("STATSD_BN_TRACEBACK", "").lower() != "full":
        error.__traceback__ = _with_one_of_ours(error.__traceback__, none=for_caller)
        # What we have translated says nothing that the error does not. What a user's code or a model has raised stays.
        if error.__cause__ is not None and all(map(_is_inside, _frames(error.__cause__.__traceback__))):
            error.__cause__ = None


def api_boundary(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Makes a public function raise its errors as users are to see them; not for one that is called in each round."""

    @functools.wraps(function)
    def raises_for_user(*arguments: ParamsT.args, **named: ParamsT.kwargs) -> ResultT:
        try:
            return function(*arguments, **named)
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise

    return raises_for_user


def _with_one_of_ours(trace: TracebackType | None, *, none: bool) -> TracebackType | None:
    frames = list(_frames(trace))
    first = None if none else next((frame for frame in frames if _is_ours(frame)), None)
    found: TracebackType | None = None
    for each in reversed(frames):
        if each is first or not _is_ours(each):
            found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace:
        yield trace
        trace = trace.tb_next


def _is_inside(trace: TracebackType) -> bool:
    """Whether a frame is of ours, or of what we call: the standard library and ZeroMQ, of which some is no file."""
    frame, file = trace.tb_frame, trace.tb_frame.f_code.co_filename
    # A compiled function of pyzmq has its module in its name, and maybe no globals.
    names = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if _is_ours(trace) or any(name.startswith("zmq.") for name in names):
        return True
    return file.startswith(_STANDARD_LIBRARY) and _INSTALLED not in file


def _is_ours(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_HIDDEN) or _FUTURES in file
