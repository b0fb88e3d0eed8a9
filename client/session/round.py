"""Round: one round of this process; while any round is under way Python's switch interval is short.

A round releases the GIL twice, to send and to receive. With the default interval of 5 ms it would wait 10 ms for the
GIL if another thread computes in Python, such as a data loader or a progress bar.
"""

import os
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Self, TypeAlias

from client.session.protocol.session import Session
from statsd_bn.round_key import RoundKey

INTERVAL_SECONDS = 0.0001


class SwitchInterval:
    """Shortens the switch interval while rounds are under way, in any thread."""

    def __init__(self) -> None:
        self._reset()

    def shorten(self) -> None:
        """Count a round that begins."""
        with self._lock:
            if self._rounds == 0:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(INTERVAL_SECONDS, self._usual))
            self._rounds += 1

    def restore(self) -> None:
        """Count a round that ends."""
        with self._lock:
            self._rounds -= 1
            if self._rounds == 0:
                sys.setswitchinterval(self._usual)

    def restore_in_child(self) -> None:
        """Restore the interval in a forked child, in which no round is under way."""
        if self._rounds:
            sys.setswitchinterval(self._usual)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._rounds = 0
        self._usual = 0.0


switch_interval = SwitchInterval()

os.register_at_fork(after_in_child=switch_interval.restore_in_child)


class Round:
    """One round of this process; a context manager around the exchange of its rows by a transport."""

    __slots__ = ("_on_end", "_started", "is_counted", "key", "native_seconds", "session")

    def __init__(self, session: Session, key: RoundKey, on_end: "EndRound", *, is_counted: bool) -> None:
        self.session = session
        self.key = key
        self._on_end = on_end
        self.is_counted = is_counted  # whether the connection counts and times it
        self.native_seconds: float | None = None  # duration that the native core measured

    def __enter__(self) -> Self:
        self._started = perf_counter()
        switch_interval.shorten()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        switch_interval.restore()
        seconds = self.native_seconds
        self._on_end(self, perf_counter() - self._started if seconds is None else seconds, error)


EndRound: TypeAlias = Callable[[Round, float, BaseException | None], None]
