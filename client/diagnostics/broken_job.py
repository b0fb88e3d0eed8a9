"""How this process reacts to the server's report that its strict job is broken.

The main thread raises the error in its current or next call of this package. But a main thread that is blocked in a
torch collective would wait for ever. So the heartbeat thread logs the cause, asks torch to abort the collective, and
ends the process after `abort_after` seconds. If the collective raises first, as gloo's does when a connection breaks,
the exception gets the cause as a note.

An NCCL collective returns at once, and the main thread blocks later, in a call that reads a value from the device, such
as `loss.item()`; no stack frame shows this. The thread counts as blocked while its stack does not change and torch's
flight recorder reports an unfinished operation. A process that makes progress is never ended. If the other ranks exited
cleanly, a process is ended only in a collective of DistributedDataParallel, which needs a training step of those ranks.
"""

import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from client.diagnostics import collectives
from client.diagnostics.sampler import ThreadSample, ThreadSampler
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.text import error_summary, escape, escape_lines, log_line

logger = logging.getLogger("statsd_bn.client")

# How long a failing process waits for the server's report of a lost process, which comes within the default
# `--silence-seconds`. CAUSE_SECONDS is below 10, because launchers kill a process 10 to 30 s after SIGTERM.
CAUSE_SECONDS = limits.SILENCE_SECONDS + 0.5

# How long a rank must be blocked in a collective before it logs a clean exit of others: at the end of a run, ranks exit
# some moments apart.
EXIT_SECONDS = 3.0

# If the main thread's stack shows no collective: how long it must stay the same before NCCL collectives are aborted.
# Until then the other ranks may still start the last collective, and it may complete.
STALL_SECONDS = 3.0

# Identifies errors of collectives by their text: a backward pass raises them like errors of the model.
_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|c10d|process ?group|connection (?:closed|reset)", re.IGNORECASE)


def is_clean_exit(error: StatsdBNError) -> bool:
    """Whether an error reports a rank that left without an error."""
    return error.fields.get("cause") == ""


def end_process(text: str) -> NoReturn:
    """Ends this process at once with exit code 1, and with a last line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or another thread is writing
            stream.flush()
    with suppress(OSError):
        os.write(2, f"{escape(text)}\n".encode())
    os._exit(1)


class BrokenJob:
    """The reported cause of a broken job, and this process's reaction; `name` is the process in log lines."""

    def __init__(
        self, sampler: ThreadSampler, name: str, abort_after: float | None, end: Callable[[str], Any] = end_process
    ) -> None:
        self.sampler = sampler
        self._name = name
        self._abort_after = abort_after
        self._end = end
        self._cause: StatsdBNError | None = None
        self._is_reported = threading.Event()
        self._is_logged = False
        self._raised: str | None = None
        self._blocked: tuple[tuple[object, ...], float] | None = None
        self._has_aborted = False

    def report(self, error: StatsdBNError) -> None:
        """Records why the job is broken. The first report counts, but a failure replaces a clean exit."""
        if self._cause is None or (is_clean_exit(self._cause) and not is_clean_exit(error)):
            self._cause = error
            self._is_reported.set()

    def record_raised(self, error: StatsdBNError) -> None:
        """Records an error that the main thread is about to raise, so that the log does not repeat it."""
        self._raised = error_summary(error)

    @property
    def is_broken(self) -> bool:
        """Whether the server has reported the job as broken."""
        return self._cause is not None

    def wait_for_cause(self, seconds: float) -> StatsdBNError | None:
        """Returns why the job is broken; None if no report comes within this many seconds."""
        self._is_reported.wait(seconds)
        return self._cause

    def check(self, now: float) -> None:
        """Logs the cause, aborts collectives or ends the process, when due; the heartbeat thread calls it regularly."""
        error = self._cause
        if error is None:
            return
        sample = self.sampler.sample()
        is_clean = is_clean_exit(error)
        if not (is_clean or sample.is_in_call):
            self._log(error, sample)
        collective = None if sample.is_in_call else sample.collective
        # A call of this package has raised by now if it waited for the server; if it still runs, it waits for a device.
        call = collective.call if collective else self.sampler.nccl_progress()
        if call is None:
            self._blocked = None
            return
        if self._blocked is None or self._blocked[0] != call:
            self._blocked = call, now
        seconds = now - self._blocked[1]
        if is_clean and seconds >= EXIT_SECONDS:
            self._log(error, sample)
        if not is_clean and (collective or seconds >= STALL_SECONDS):
            self._abort_collectives()
        must_end = not is_clean or (collective is not None and collective.is_of_training)
        if self._abort_after is not None and must_end and seconds >= self._abort_after:
            where = sample.stack or "a collective of torch"
            behind = "" if collective else ", behind a collective of NCCL,"
            since = f"blocked in {where}{behind} for {seconds:.0f} s after its job broke"
            self._end(f"aborting {self._name}: {since}: {log_line(error)}")

    def annotate(self, error: BaseException) -> None:
        """Adds the cause as a note to an exception that is not a `StatsdBNError`.

        For an exception of a torch collective, waits up to `CAUSE_SECONDS` for the report. If a launcher sends SIGTERM
        during this wait, prints the exception and ends the process.
        """
        if isinstance(error, StatsdBNError) or not isinstance(error, Exception):
            return
        if not _is_of_collective(error):
            if self._cause and not is_clean_exit(self._cause):
                self._add_note(error, self._cause)
            return
        with _deferred_termination() as signals:
            if cause := self.wait_for_cause(CAUSE_SECONDS):
                self._add_note(error, cause)
            if signals:
                traceback.print_exception(error)
                sys.stderr.flush()

    def _add_note(self, error: Exception, cause: StatsdBNError) -> None:
        text = f"{type(cause).__name__}: {escape_lines(str(cause))}"
        if self._is_logged and logger.isEnabledFor(logging.ERROR):
            text = "the job is broken; see the log for the cause"
        note = f"statsd_bn: {text}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def _log(self, error: StatsdBNError, sample: ThreadSample) -> None:
        # After a mismatch all ranks raise the same error; in the report it may be the cause of another rank's loss.
        if self._is_logged or (self._raised and self._raised in {error_summary(error), error.fields.get("cause")}):
            return
        self._is_logged = True
        where = f"; {self._name} is in {sample.stack}" if sample.stack else ""
        logger.error("%s: %s%s", type(error).__name__, log_line(error), where)

    def _abort_collectives(self) -> None:
        if not self._has_aborted:
            self._has_aborted = True
            # The call may never return.
            threading.Thread(target=collectives.abort, name="statsd_bn abort", daemon=True).start()


def _is_of_collective(error: Exception) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    is_torchs = collectives.module_of(frames[-1]).startswith("torch.")
    is_named = is_torchs and _COLLECTIVE_ERROR.search(str(error)) is not None
    return is_named or collectives.collective_frame(frames[-1]) is not None


@contextmanager
def _deferred_termination() -> Iterator[list[int]]:
    """Defers SIGTERM, which launchers send when a rank ends, to the end of the block; yields the received signals."""
    signals: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield signals
        return

    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signals:
            os.kill(os.getpid(), signal.SIGTERM)
