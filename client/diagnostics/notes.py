"""Notes: an exception that another rank has caused says so.

If a rank ends, torch's collectives raise on the others, and say only that a connection was closed. The server knows who
has ended and why, or will within a moment.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from client.diagnostics import collectives, stack
from client.diagnostics.broken_job import NEWS_SECONDS, BrokenJob, has_left_in_order
from statsd_bn.errors import StatsdBNError
from statsd_bn.text import readable

# What an error of a collective says that autograd's engine raises; it raises those of the model too.
_WORDS = ("gloo", "nccl", "c10d", "processgroup", "process group", "connection closed", "connection reset")


def explain(error: BaseException, job: BrokenJob) -> None:
    """Adds what the server knows about the end of the job to an exception that is not ours.

    If the exception comes out of a collective of torch and there is no news yet, it waits for it for a moment. A
    launcher may have asked this process to end meanwhile; then it prints the exception and ends.
    """
    if isinstance(error, StatsdBNError) or not isinstance(error, Exception):
        return
    if not _comes_from_torch(error):
        news = job.wait(0.0)
        if news and not has_left_in_order(news):
            _add(error, news, job)
        return
    with _termination_waits() as asked_to_end:
        if news := job.wait(NEWS_SECONDS):
            _add(error, news, job)
        if asked_to_end:
            traceback.print_exception(error)
            sys.stderr.flush()


def _add(error: Exception, news: StatsdBNError, job: BrokenJob) -> None:
    text = "the log says what ended the job" if job.is_logged else f"{type(news).__name__}: {readable(str(news))}"
    note = f"statsd_bn: {text}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _comes_from_torch(error: Exception) -> bool:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is None:
        return False
    if collectives.is_collective(trace.tb_frame):
        return True
    text = str(error).lower()
    return stack.module_of(trace.tb_frame).startswith("torch.") and any(word in text for word in _WORDS)


@contextmanager
def _termination_waits() -> Iterator[list[int]]:
    """Holds up SIGTERM, which a launcher sends as soon as it sees that another rank has ended, until the end.

    Yields:
        A list that is not empty any more once the signal has come.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield came
        return

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGTERM, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)
