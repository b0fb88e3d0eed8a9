"""Termination: a process that is told to end while it waits in a round says first who is missing, if anybody is.

A launcher sends SIGTERM to all ranks about 0.1 s after it has seen that one has ended. That is before the server knows
it of a rank that was killed, so the others would end without a word. Here the signal waits a moment for the news.

The signal is held only while the main thread is in a round, and for longer than a moment, since to hold it takes as
long as much else of a round. At other times it may be in a call of C that does not return, such as a collective of
torch. There a handler of Python would never run, and the process would not end.
"""

import ctypes
import logging
import os
import signal
import threading

# The functions of `signal` take ten times as long, since they turn numbers into names; each round calls them.
from _signal import getsignal  # type: ignore[import-not-found] # it has no types
from _signal import signal as set_handler
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from client.whereabouts.broken_job import NEWS_SECONDS, BrokenJob
from statsd_bn.error_text import in_log

logger = logging.getLogger("statsd_bn.client")

# What the system does with a signal: Python knows neither a handler of C, such as `faulthandler.register` sets, nor
# whether calls go on after the signal. This is larger than any system's structure of it.
_BYTES = 256
_sigaction = ctypes.CDLL(None).sigaction if os.name == "posix" else None

_NOBODY = object()

Handler = Callable[[int, FrameType | None], object] | int
"""What handles a signal: a function, or a number of the system's."""


class Termination:
    """Holds SIGTERM for as long as a round lasts; the script's own handler is called, or the process ends by it.

    Args:
        job: hears why the job is broken.
        seconds: how long the signal waits for that news.
    """

    def __init__(self, job: BrokenJob, seconds: float = NEWS_SECONDS) -> None:
        self._job = job
        self._seconds = seconds
        self._before: Handler = signal.SIG_DFL
        self._action = ctypes.create_string_buffer(_BYTES)
        # One object, so that it is known again.
        self._handler = self._handle
        self._has_come = False
        self._holder: object = _NOBODY

    def begin(self, holder: object = None) -> bool:
        """A round begins; returns whether the signal is held from now on, which only the main thread can do.

        Call `end` whatever happens, also if this has raised: Ctrl-C may come at any place.

        Args:
            holder: what `end` will be called with.
        """
        if threading.get_ident() != threading.main_thread().ident:
            return False
        before = getsignal(signal.SIGTERM)
        # A handler of C is not one of Python's; of a round in a round the outer one holds the signal.
        if before is None or before == signal.SIG_IGN or before is self._handler:
            return False
        self._before = before
        if _sigaction:
            _sigaction(signal.SIGTERM, None, self._action)
        self._holder = holder
        set_handler(signal.SIGTERM, self._handler)
        return True

    def end(self, holder: object = None) -> None:
        """A round has ended; the signal is handled as before, if this round has held it."""
        if self._holder is not holder:
            return
        # Unless the script's handler has chosen another meanwhile.
        if getsignal(signal.SIGTERM) is self._handler:
            self._restore()
        self._holder = _NOBODY

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Whoever sends it again does not want to wait.
        if not self._has_come:
            self._has_come = True
            if news := self._job.wait(self._seconds):
                with suppress(Exception):  # it may have come while a line was being written
                    logger.error("told to end by SIGTERM: %s", in_log(news))
        if callable(self._before):
            self._before(number, frame)
        else:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        set_handler(signal.SIGTERM, self._before)
        if _sigaction:
            _sigaction(signal.SIGTERM, self._action, None)
