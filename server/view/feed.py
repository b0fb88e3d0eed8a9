"""Feed: requests the server's report every second, in a separate thread, and publishes snapshots."""

import threading
import time
from collections.abc import Callable
from typing import Any

from server.cli.status import MALFORMED, malformed_report
from server.view.snapshot import Snapshot, SnapshotBuilder
from statsd_bn.errors import StatsdBNError
from statsd_bn.text import log_line

PERIOD_SECONDS = 1.0


class Feed:
    """The latest snapshot of a server."""

    def __init__(self, endpoint: str, report: Callable[[], dict[str, Any]]) -> None:
        self._builder = SnapshotBuilder(endpoint)
        self._report = report
        self._stopped = threading.Event()
        self._changed_since = threading.Condition()
        self._number = 0
        self.snapshot: Snapshot = {}

    def refresh(self) -> Snapshot:
        """Request one report; returns the snapshot.

        Raises:
            ServerUnreachable: the server has never answered.
            AuthenticationRefused: it has never accepted our keys.
        """
        try:
            snapshot = self._fetch()
        except Exception as error:
            if not self.snapshot:
                raise
            snapshot = self._builder.fail(time.time(), _in_words(error))
        self._publish(snapshot)
        return snapshot

    def _fetch(self) -> Snapshot:
        report = self._report()
        try:
            return self._builder.update(time.time(), report)
        except MALFORMED as error:
            raise malformed_report(error) from error

    def _publish(self, snapshot: Snapshot) -> None:
        with self._changed_since:
            self.snapshot = snapshot
            self._number += 1
            self._changed_since.notify_all()

    def next(self, after: int, seconds: float) -> tuple[int, Snapshot]:
        """Number and snapshot: waits up to `seconds` for a number above `after`."""
        with self._changed_since:
            self._changed_since.wait_for(lambda: self._number > after or self._stopped.is_set(), seconds)
            return self._number, self.snapshot

    def run(self) -> None:
        """Request a report every second until `stop`."""
        while not self._stopped.wait(PERIOD_SECONDS):
            self.refresh()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End `run` and all calls of `next`."""
        self._stopped.set()
        with self._changed_since:
            self._changed_since.notify_all()


def _in_words(error: Exception) -> str:
    return log_line(error if isinstance(error, StatsdBNError) else f"{type(error).__name__}: {error}")
