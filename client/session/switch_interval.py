"""Quick switches between threads while a round is under way.

A thread that wants Python's global lock gets it after the switch interval, 5 ms. A round gives the lock away twice, to
send and to receive, so beside a thread that computes in Python (it reads data, or draws a progress bar) it would take
10 ms to have it back. The interval is shorter as long as any round is under way.
"""

import os
import sys
import threading

INTERVAL_SECONDS = 0.0001


class Switching:
    """Counts the rounds that are under way, of all threads."""

    def __init__(self) -> None:
        self._forget()

    def begin(self) -> None:
        """A round begins."""
        with self._lock:
            if self._rounds == 0:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(INTERVAL_SECONDS, self._usual))
            self._rounds += 1

    def end(self) -> None:
        """A round has ended."""
        with self._lock:
            self._rounds -= 1
            if self._rounds == 0:
                sys.setswitchinterval(self._usual)

    def end_all(self) -> None:
        """This is a forked child, and has none of the threads whose rounds are under way."""
        if self._rounds:
            sys.setswitchinterval(self._usual)
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._rounds = 0
        self._usual = 0.0


switching = Switching()

os.register_at_fork(after_in_child=switching.end_all)
