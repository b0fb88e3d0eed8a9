"""Feed: asks the server once a second, in a thread of its own, and hands each snapshot to whoever shows it."""

import threading
import time
from collections.abc import Callable
from typing import Any

from server.cli.status import UNSOUND, unsound
from server.view.snapshot import Snapshot, Watcher
from statsd_bn.error_text import in_log
from statsd_bn.errors import StatsdBNError

PERIOD_SECONDS = 1.0


class Feed:
    """The newest snapshot of a server.

    Args:
        endpoint: of the server, for people.
        report: asks the server.
    """

    def __init__(self, endpoint: str, report: Callable[[], dict[str, Any]]) -> None:
        self._watcher = Watcher(endpoint)
        self._report = report
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._number = 0
        self.snapshot: Snapshot = {}

    def ask(self) -> Snapshot:
        """Ask once; returns the snapshot.

        Raises:
            ServerUnreachable: the server has never answered.
            AuthenticationRefused: it has never accepted our keys.
        """
        try:
            snapshot = self._take()
        except Exception as error:
            if not self.snapshot:
                raise
            snapshot = self._watcher.fail(time.time(), _in_words(error))
        self._show(snapshot)
        return snapshot

    def _take(self) -> Snapshot:
        report = self._report()
        try:
            return self._watcher.take(time.time(), report)
        except UNSOUND as error:
            raise unsound(error) from error

    def _show(self, snapshot: Snapshot) -> None:
        with self._changed:
            self.snapshot = snapshot
            self._number += 1
            self._changed.notify_all()

    def next(self, after: int, seconds: float) -> tuple[int, Snapshot]:
        """Number and snapshot once there is one after number `after`, or the last one after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > after or self._stopped.is_set(), seconds)
            return self._number, self.snapshot

    def run(self) -> None:
        """Ask once a second until `stop`."""
        while not self._stopped.wait(PERIOD_SECONDS):
            self.ask()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End `run`, and let nobody wait."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()


def _in_words(error: Exception) -> str:
    return in_log(error if isinstance(error, StatsdBNError) else f"{type(error).__name__}: {error}")
