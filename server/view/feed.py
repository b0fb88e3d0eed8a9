"""Feed: requests the server's report with the skew figures every second, in a thread, and publishes snapshots."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from server.cli.status import Query, query_connection, refuses_malformed, report_of
from server.view.snapshot import Snapshot, SnapshotBuilder
from server.view.text import describe
from statsd_bn import limits
from statsd_bn.errors import ProtocolError, ServerUnreachable, StatsdBNError
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Figures, FiguresRequest, StatusRequest
from statsd_bn.skew import MEAN, PART, VARIANCE
from statsd_bn.text import log_line
from statsd_bn.wire import decode

# Pause between two reports, and time limit for all figures of one report, so that the status stays current.
PERIOD_SECONDS = FIGURES_SECONDS = 1.0


class Feed:
    """The latest snapshot of the server at `endpoint`; `report` requests a report."""

    def __init__(self, endpoint: str, report: Callable[[], dict[str, Any]]) -> None:
        self._builder = SnapshotBuilder(endpoint)
        self._report = report
        self._changed = threading.Condition()  # held while a snapshot is built
        self._number = 0
        self.snapshot: Snapshot = {}
        self.stopped = False

    def refresh(self) -> Snapshot:
        """Request one report and return the snapshot; raise an error only if there is no earlier snapshot."""
        try:
            report = self._report()
            with self._changed, refuses_malformed():
                return self._publish(self._builder.update(time.time(), report))
        except Exception as error:
            if not self.snapshot:
                raise
            text = log_line(error if isinstance(error, StatsdBNError) else f"{type(error).__name__}: {error}")
            with self._changed:
                return self._publish(self._builder.fail(time.time(), text))

    def _publish(self, snapshot: Snapshot) -> Snapshot:
        self.snapshot, self._number = snapshot, self._number + 1
        self._changed.notify_all()
        return snapshot

    def history(self, job: str, group: str, layer: str) -> dict[str, Any] | None:
        """Mean and variance of a layer by rank, see `SnapshotBuilder.history`."""
        with self._changed:
            return self._builder.history(job, group, layer)

    def next(self, after: int, seconds: float) -> tuple[int, Snapshot]:
        """Wait up to `seconds` for a snapshot numbered above `after`; return the latest number and snapshot."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > after or self.stopped, seconds)
            return self._number, self.snapshot

    def run(self) -> None:
        """Request a report every second until `stop`."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self.stopped, PERIOD_SECONDS):
                    return
            self.refresh()

    def stop(self) -> None:
        """End `run` and all calls of `next`."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


def fetch_report(endpoint: str, keys: ClientKeys | None) -> dict[str, Any]:
    """Report of a server, with the figures of its groups."""
    with query_connection(endpoint, keys=keys) as question:
        report = report_of(endpoint, question(StatusRequest()))
        describe(report)  # raises for a malformed report
        add_figures(question, report["groups"])
    return report


def add_figures(ask: Query, groups: list[dict[str, Any]]) -> None:
    """Add `figures` to the entries of the groups that have any.

    `figures` has `layers`, a list in the order of a step. A layer has its `name`; `eta2`, the share of its variance
    between the members; and `parts`, `means` and `variances`, float32 arrays with the figures of each member.
    """
    ends = time.monotonic() + FIGURES_SECONDS
    # The server has figures of strict groups only.
    for group in (one for one in groups if not one.get("min_members")):
        if time.monotonic() > ends:
            return
        try:
            layers = _layers(ask, group["job"], group["group"])
        except ProtocolError as error:
            raise ServerUnreachable(f"malformed figures, is the server of another version? {error.message}") from error
        # A group may restart with other members between two answers.
        if len({len(layer["parts"]) for layer in layers}) == 1:
            group["figures"] = {"layers": layers}


def _layers(ask: Query, job: str, group: str) -> list[dict[str, Any]]:
    """All layers of a group; none if the server does not send all of them."""
    found: list[dict[str, Any]] = []
    while len(found) < limits.MAX_FIGURES_LAYERS:
        answer = decode(ask(FiguresRequest(job, group, len(found))))
        if not isinstance(answer, Figures):
            return []
        for name, figures in zip(answer.names, answer.values, strict=True):
            means, variances, parts = figures[:, [MEAN, VARIANCE, PART]].T.astype(np.float32)
            entry = {"name": name, "eta2": float(figures[:, PART].sum())}
            found.append({**entry, "parts": parts, "means": means, "variances": variances})
        if not answer.names or len(found) >= answer.total:
            break
    return found
