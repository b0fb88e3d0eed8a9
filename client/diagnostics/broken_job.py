"""BrokenJob: what this process does when the server says that its strict job is broken.

A main thread that is in a call of ours gets the error there, and one that computes gets it at its next round. One that
waits in a collective of torch would never get it: a rank that it waits for has gone, or will not come. So the thread
of the heartbeats logs the reason, has torch give up the collective where torch can do that, and after a while ends the
process. What ends by itself before that, as gloo's collectives do when a connection breaks, gets the reason as a note.

A collective of NCCL returns at once. The main thread waits later, in any call that reads a value from the device, such
as `loss.item()`, and no stack frame shows that. So the thread counts as waiting for NCCL while torch's flight recorder
reports an unfinished NCCL operation and the thread's stack does not change.

Never end a process whose main thread makes progress. If the other ranks have left in good order, end a process only if
it waits in a collective of DistributedDataParallel itself: it would train on without them.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from client.diagnostics import collectives
from client.diagnostics.look import Look, Looks
from statsd_bn.error_text import in_brief, in_log
from statsd_bn.errors import StatsdBNError
from statsd_bn.text import plain

logger = logging.getLogger("statsd_bn.client")

# How long a process that is about to end waits for the server's report. The server detects a killed process within a
# second, on a busy host within a few, and any lost process within `silence_seconds`, 3.5 by default. Launchers kill a
# process 10 to 30 s after SIGTERM.
NEWS_SECONDS = 4.0

# How long others may have left before a rank that waits for them in a collective is told: at the end of a run they
# leave some moments apart.
LEFT_SECONDS = 3.0

# How long the main thread's stack must not change before its NCCL collectives are aborted. Until then the other ranks
# may still start the last collective, and it may complete.
STILL_SECONDS = 3.0


def has_left_in_order(error: StatsdBNError) -> bool:
    """Whether an error says that a rank has left without an error of its own."""
    return error.fields.get("cause") == ""


def end_process(text: str) -> NoReturn:
    """Ends this process at once, with a last line on its error output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or another thread is writing
            stream.flush()
    with suppress(OSError):
        os.write(2, f"{plain(text)}\n".encode())
    os._exit(1)


class BrokenJob:
    """The news of this process's job, and what follows from it.

    Args:
        abort_after: how long the main thread may stay in one collective after the news, or stand still behind one of
            NCCL, in seconds; None: for ever.
    """

    def __init__(
        self, looks: Looks, name: str, abort_after: float | None, end: Callable[[str], Any] = end_process
    ) -> None:
        self.looks = looks
        self._name = name
        self._abort_after = abort_after
        self._end = end
        self._news: StatsdBNError | None = None
        self._has_come = threading.Event()
        self._is_told = False
        self._raised: str | None = None
        self._held: tuple[tuple[object, ...], float] | None = None
        self._has_aborted = False

    def take(self, error: StatsdBNError) -> None:
        """Takes the news that the job is broken. The first says most, but a failure says more than a good-bye."""
        if self._news is None or (has_left_in_order(self._news) and not has_left_in_order(error)):
            self._news = error
            self._has_come.set()

    def raises(self, error: StatsdBNError) -> None:
        """Takes note of an error that the main thread is about to raise: the log does not repeat it."""
        self._raised = in_brief(error)

    @property
    def is_logged(self) -> bool:
        """Whether the log says why the job is broken."""
        return self._is_told and logger.isEnabledFor(logging.ERROR)

    @property
    def has_news(self) -> bool:
        """Whether it is known to be broken."""
        return self._news is not None

    def wait(self, seconds: float) -> StatsdBNError | None:
        """Returns why the job is broken, if that is known within some time; None while it is not."""
        self._has_come.wait(seconds)
        return self._news

    def step(self, now: float) -> None:
        """Does what is due; the heartbeat's thread calls it each time that it runs."""
        error = self._news
        if error is None:
            return
        look = self.looks.look()
        in_order = has_left_in_order(error)
        if not (in_order or look.is_in_call):
            self._tell(error, look)
        collective = None if look.is_in_call else look.collective
        # A call of ours that waits for the server has raised by now, and only one that waits for a device stands still.
        call = collective.call if collective else self.looks.standstill()
        if call is None:
            self._held = None
            return
        if self._held is None or self._held[0] != call:
            self._held = call, now
        seconds = now - self._held[1]
        if in_order and seconds >= LEFT_SECONDS:
            self._tell(error, look)
        if not in_order and (collective or seconds >= STILL_SECONDS):
            self._abort()
        is_doomed = not in_order or (collective is not None and collectives.is_of_training(collective))
        if self._abort_after is not None and is_doomed and seconds >= self._abort_after:
            where = look.place.stack or "a collective of torch"
            behind = "" if collective else ", behind a collective of NCCL,"
            since = f"has waited in {where}{behind} for {seconds:.0f} s since its job broke"
            self._end(f"{self._name} {since}, and ends now: {in_log(error)}")

    def _tell(self, error: StatsdBNError, look: Look) -> None:
        # What ended another rank was raised here as well, if it was a mismatch.
        if self._is_told or (self._raised and self._raised in {in_brief(error), error.fields.get("cause")}):
            return
        self._is_told = True
        where = f"; {self._name} is in {look.place.stack}" if look.place.stack else ""
        logger.error("%s: %s%s", type(error).__name__, in_log(error), where)

    def _abort(self) -> None:
        if not self._has_aborted:
            self._has_aborted = True
            # It may take its time, or not return.
            threading.Thread(target=collectives.abort, name="statsd_bn abort", daemon=True).start()
