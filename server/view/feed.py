"""Feed: requests the server's report and skew figures every second, and publishes snapshots, in a thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from server.cli.status import Query, query_connection, refuses_malformed, report_of
from server.view.snapshot import Snapshot, SnapshotBuilder
from server.view.text import describe
from statsd_bn import limits
from statsd_bn.errors import ProtocolError, ServerUnreachable, StatsdBNError
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Figures, FiguresRequest, StatusRequest
from statsd_bn.reduction import FloatArray
from statsd_bn.skew import MEAN, PART, VARIANCE
from statsd_bn.text import log_line
from statsd_bn.wire import decode

# Pause between two reports, and time limit for all figures of one report, so that the status stays current.
PERIOD_SECONDS = FIGURES_SECONDS = 1.0

MAX_BYTES = 2**21  # of figures in a report: half of the server's limit per tenant and second


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


def fetch_report(endpoint: str, keys: ClientKeys | None, figures: "FigureReader") -> dict[str, Any]:
    """Report of a server, with the figures of its groups."""
    with query_connection(endpoint, keys=keys) as question:
        report = report_of(endpoint, question(StatusRequest()))
        describe(report)  # raises for a malformed report
        figures.add_to(question, report["groups"])
    return report


@dataclass(slots=True)
class _GroupFigures:
    """A group's latest complete figures, and the layers and values of the answers received since."""

    latest: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    values: list[FloatArray] = field(default_factory=list)
    completed: float = 0.0  # in seconds of the monotonic clock

    def add(self, answer: Figures) -> bool:
        """Add the next layers; return whether all are there now."""
        self.names += answer.names
        self.values.append(answer.values)
        if answer.names and len(self.names) < min(answer.total, limits.MAX_FIGURES_LAYERS):
            return False
        self.latest = {}
        # Between two answers a group may restart with other members, and its layers may change or get another order.
        is_whole = answer.names and len(set(self.names)) >= min(answer.total, limits.MAX_FIGURES_LAYERS)
        if is_whole and len({values.shape[1] for values in self.values}) == 1:
            values = np.concatenate(self.values)
            means, variances, parts = (values[..., which].astype(np.float32) for which in (MEAN, VARIANCE, PART))
            kinds = {"parts": parts, "means": means, "variances": variances}
            self.latest = {"layers": self.names, "eta2": values[..., PART].sum(axis=1).tolist(), **kinds}
        self.names, self.values = [], []
        self.completed = time.monotonic()
        return True


class FigureReader:
    """Requests the figures of all groups: each second up to `MAX_BYTES`, so a large group takes several reports."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, int], _GroupFigures] = {}

    def add_to(self, ask: Query, groups: list[dict[str, Any]]) -> None:
        """Add `figures` to the entries of the groups that have any.

        `figures` has `layers`, the names in the order of a step; `eta2`, the share of each layer's variance that lies
        between the members; and float32 arrays of shape (layers, members): `parts` of eta2, `means`, `variances`.
        """
        # The server has figures of strict groups only.
        strict = {(one["job"], one["group"], one["epoch"]): one for one in groups if not one.get("min_members")}
        self._groups = {key: self._groups.get(key) or _GroupFigures() for key in strict}
        try:
            self._request(ask)
        except ProtocolError as error:
            raise ServerUnreachable(f"malformed figures, is the server of another version? {error.message}") from error
        for key, figures in self._groups.items():
            if figures.latest:
                strict[key]["figures"] = figures.latest

    def _request(self, ask: Query) -> None:
        left, ends = MAX_BYTES, time.monotonic() + FIGURES_SECONDS
        for (job, group, _), figures in sorted(self._groups.items(), key=lambda item: item[1].completed):
            is_complete = False
            while not is_complete:
                if left <= 0 or time.monotonic() > ends:
                    return
                answer = decode(ask(FiguresRequest(job, group, len(figures.names))))
                if not isinstance(answer, Figures):  # over the tenant's rate limit, which would refuse other groups too
                    return
                is_complete = figures.add(answer)
                left -= answer.values.nbytes
