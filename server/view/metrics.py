"""Metrics: a snapshot in Prometheus format, for the first ranks and the most skewed layers of each group."""

from collections.abc import Callable, Iterator
from heapq import nlargest
from itertools import accumulate, chain, repeat
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from server.group.health import MAX_DELAY_SHARE
from server.view.snapshot import Snapshot
from server.view.verdict import count_here
from statsd_bn.messages import WORLD
from statsd_bn.timing import BOUNDS

GROUP = ("job", "group")

# Ranks of a group with their own series: Prometheus keeps every series in memory.
MAX_RANKS = 64

# Layers of a group with their own series.
MAX_LAYERS = 20


# Histograms of a group, with their help texts.
HISTOGRAMS = (
    ("round_seconds", "How long rounds at the server were open, from the first contribution to the last."),
    (
        "late_seconds",
        "How much later than all others the last rank came to rounds, in shared memory too.",
    ),
    ("round_trip_seconds", "How long rounds took, as all ranks saw them, from a contribution to its aggregate."),
)


class Metrics:
    """The content of `/metrics`."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

    def describe(self) -> list[Metric]:
        """Empty, so that the registry does not collect before the first snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of the latest snapshot."""
        snapshot = self._snapshot()
        up = GaugeMetricFamily("statsd_bn_up", "Whether the server answers the view.")
        up.add_metric((), float(not snapshot["error"]))
        yield up
        events = CounterMetricFamily("statsd_bn_events", "Events since the view started.", labels=("kind",))
        for kind, count in snapshot["counts"].items():
            events.add_metric((kind,), count)
        yield events
        # The last numbers of an unreachable server would look like a stalled job.
        groups = [] if snapshot["error"] else [group for group in snapshot["groups"] if "over" not in group]
        # A group that the report leaves out may still be running.
        ended = [] if snapshot["error"] or snapshot.get("left_out") else snapshot["ended"]
        yield from _group_metrics(groups)
        yield _broken(groups, ended)
        yield from _rank_metrics(groups)
        yield from (_histogram(groups, *named) for named in HISTOGRAMS)
        yield _skew(groups)


def _group_metrics(groups: list[dict[str, Any]]) -> Iterator[Metric]:
    counters = {"rounds": "rounds_done", "rounds_failed": "rounds_failed"}
    for name, field in counters.items():
        counter = CounterMetricFamily(f"statsd_bn_{name}", f"The server's `{field}`.", labels=GROUP)
        for group in groups:
            counter.add_metric(_labels(group), group[field])
        yield counter
    gauges: dict[str, Callable[[dict[str, Any]], float]] = {
        "members": lambda group: int(count_here(group).partition(" ")[0]),
        "world_size": lambda group: group["world_size"],
        "non_finite": lambda group: len(group.get("non_finite", ())),
        "findings": _findings,
        "waiting_seconds": lambda group: max((round_["seconds"] for round_ in group["waiting"]), default=0.0),
    }
    for name, value in gauges.items():
        gauge = GaugeMetricFamily(f"statsd_bn_{name}", f"The group's {name.replace('_', ' ')}.", labels=GROUP)
        for group in groups:
            gauge.add_metric(_labels(group), float(value(group)))
        yield gauge
    text = "The verdict: 0 healthy, 1 worth a look, 2 needs attention, 3 broken."
    severity = GaugeMetricFamily("statsd_bn_severity", text, labels=(*GROUP, "state"))
    text = "The step of the first NaN or infinity."
    first_step = GaugeMetricFamily("statsd_bn_first_non_finite_step", text, labels=(*GROUP, "layer", "rank"))
    text = "The variance of a rank that differs, divided by the median of the others'."
    ratio = GaugeMetricFamily("statsd_bn_finding_variance_ratio", text, labels=(*GROUP, "layer", "rank"))
    for group in groups:
        severity.add_metric((*_labels(group), group["verdict"]["state"]), group["verdict"]["severity"])
        if first := group["first_non_finite"]:
            ranks = ",".join(map(str, first["ranks"]))
            first_step.add_metric((*_labels(group), first["layer"], ranks), first["step"])
        latest = {(one["layer"], str(one["rank"])): one for one in _differing(group) if "variance" in one}
        for (layer, rank), finding in latest.items():
            ratio.add_metric((*_labels(group), layer, rank), finding["variance"])
    yield from (severity, first_step, ratio)


def _differing(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The skew findings that the latest samples still show."""
    return [one for one in group.get("findings", ()) if one["kind"] == "skew" and not one.get("cleared")]


def _findings(group: dict[str, Any]) -> int:
    return len(_differing(group)) + int(group.get("held", 0.0) >= MAX_DELAY_SHARE)


def _broken(groups: list[dict[str, Any]], ended: list[dict[str, Any]]) -> Metric:
    """Whether each group is broken, including ended jobs: ranks leave a broken job within a second."""
    text = "Whether the group is broken; for some minutes after its end too, while no job of that name runs."
    gauge = GaugeMetricFamily("statsd_bn_broken", text, labels=GROUP)
    broken = {_labels(group): bool(group["lost"]) for group in groups}
    running = {group["job"] for group in groups}
    # Latest first.
    for job in ended:
        if job["job"] not in running:
            broken.setdefault((job["job"], WORLD), bool(job["lost"]))
    for labels, is_broken in broken.items():
        gauge.add_metric(labels, float(is_broken))
    return gauge


def _rank_metrics(groups: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = (*GROUP, "rank")
    step = GaugeMetricFamily("statsd_bn_rank_step", "The last step of a rank.", labels=labels)
    score = GaugeMetricFamily("statsd_bn_rank_score", "How fast a rank is, 0 to 1.", labels=labels)
    waiting = GaugeMetricFamily(
        "statsd_bn_rank_waiting", "The part of the last minute that a rank waited.", labels=labels
    )
    awaited = GaugeMetricFamily(
        "statsd_bn_rank_awaited", "The part of the last minute that the others waited for a rank.", labels=labels
    )
    median = GaugeMetricFamily(
        "statsd_bn_rank_round_trip_median_seconds", "The median of how long a rank's rounds took.", labels=labels
    )
    trip = GaugeMetricFamily(
        "statsd_bn_rank_round_trip_seconds", "The 99th percentile of how long a rank's rounds took.", labels=labels
    )
    for group in groups:
        for member in group["members"][:MAX_RANKS]:
            of = (*_labels(group), str(member["member"]))
            step.add_metric(of, member["step"])
            if member.get("score") is not None:
                score.add_metric(of, member["score"])
            if member.get("waiting") is not None:
                waiting.add_metric(of, member["waiting"])
            if member.get("round_trip"):
                median.add_metric(of, member["median"])
                trip.add_metric(of, member["p99"])
            if member["share"] is not None:
                awaited.add_metric(of, member["share"])
    yield from (step, score, waiting, awaited, median, trip)


def _histogram(groups: list[dict[str, Any]], field: str, text: str) -> Metric:
    family = HistogramMetricFamily(f"statsd_bn_{field}", text, labels=GROUP)
    for group in groups:
        if histogram := group.get(field):
            # The report omits empty buckets at the end; a series needs all of them.
            up_to = accumulate(chain(histogram["counts"], repeat(0)))
            buckets = [(repr(bound), total) for bound, total in zip(BOUNDS, up_to, strict=False)]
            family.add_metric(_labels(group), [*buckets, ("+Inf", sum(histogram["counts"]))], histogram["sum"])
    return family


def _skew(groups: list[dict[str, Any]]) -> Metric:
    text = "The share of a layer's variance between the ranks, 0 to 1."
    gauge = GaugeMetricFamily("statsd_bn_skew_eta2", text, labels=(*GROUP, "layer"))
    for group in groups:
        layers = group.get("figures", {}).get("layers", ())
        for layer in nlargest(MAX_LAYERS, layers, key=lambda layer: layer["eta2"]):
            gauge.add_metric((*_labels(group), layer["name"]), layer["eta2"])
    return gauge


def _labels(group: dict[str, Any]) -> tuple[str, str]:
    return group["job"], group["group"]
