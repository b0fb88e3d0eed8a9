"""Interruption: a signal that comes while somebody waits, and whose handler takes longer than the wait."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_SECONDS = 0.1


@contextmanager
def interrupted(rescue: Callable[[], object]) -> Iterator[None]:
    """Interrupts a wait of `WAIT_SECONDS` in the main thread.

    Args:
        rescue: ends a wait that does not end by itself.
    """
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(2 * WAIT_SECONDS))
    waiting = threading.get_ident()
    timers = [
        threading.Timer(WAIT_SECONDS / 2, lambda: signal.pthread_kill(waiting, signal.SIGUSR1)),
        threading.Timer(50 * WAIT_SECONDS, rescue),
    ]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        timers[0].join()
        timers[1].cancel()
        signal.signal(signal.SIGUSR1, before)
