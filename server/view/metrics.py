"""Metrics: a snapshot in Prometheus format, for the first ranks and the most skewed layers of each group."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, chain, repeat
from operator import itemgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from server.group.health import MAX_DELAY_SHARE
from server.view.snapshot import Snapshot
from server.view.verdict import count_here, held_share
from statsd_bn.timing import BOUNDS

Group = dict[str, Any]

# Ranks and layers of a group with their own series: Prometheus keeps every series in memory.
MAX_RANKS, MAX_LAYERS = 64, 20

# Counters and gauges of groups: the labels besides job and group, and the help text.
COUNTERS = {"rounds": ("", "Rounds that ended with an aggregate."), "rounds_failed": ("", "Rounds that failed.")}
GAUGES = {
    "members": ("", "The number of ranks that are here."),
    "world_size": ("", "The group's world size."),
    "non_finite": ("", "The number of non-finite aggregates in the report: the first forward and the first backward."),
    "findings": ("", "The number of findings on data that still hold, plus 1 while a rank is slow."),
    "waiting_seconds": ("", "How long the oldest open round has been open."),
    "broken": ("", "Whether the group is broken; kept for ten minutes after its end unless a job of that name runs."),
    "severity": ("state", "The verdict: 0 healthy, 1 worth a look, 2 needs attention, 3 broken."),
    "first_non_finite_step": ("layer rank", "The step of the first NaN or infinity."),
    "finding_variance_ratio": (
        "layer rank",
        "The variance of a rank that differs, divided by the median of the others'.",
    ),
    "rank_step": ("rank", "The last step of a rank."),
    "rank_score": ("rank", "How fast a rank is, 0 to 1."),
    "rank_waiting": ("rank", "The part of the last minute that a rank spent in rounds."),
    "rank_awaited": ("rank", "The part of the last minute that the others waited for the slowest rank; 0 for others."),
    "rank_round_trip_median_seconds": ("rank", "The median round trip of a rank."),
    "rank_round_trip_seconds": ("rank", "The 99th percentile of a rank's round trips."),
    "skew_eta2": ("layer", "The share of a layer's variance that lies between the ranks, 0 to 1."),
}
HISTOGRAMS = {
    "round_seconds": "How long rounds at the server were open, from the first contribution to the last.",
    "late_seconds": "How much later than all others the last rank came to rounds, in shared memory too.",
    "round_trip_seconds": "How long rounds took, as all ranks saw them, from a contribution to its aggregate.",
}

# Gauge name to field name, for gauges that show a field of another name in a snapshot's members.
FIELDS = {"rank_awaited": "share", "rank_round_trip_median_seconds": "median", "rank_round_trip_seconds": "p99"}


@dataclass(frozen=True)
class Metrics:
    """The metrics of a snapshot, for `prometheus_client.generate_latest`."""

    snapshot: Snapshot

    def collect(self) -> Iterator[Metric]:
        """The metrics of the view, and of all groups."""
        snapshot = self.snapshot
        up = GaugeMetricFamily("statsd_bn_up", "Whether the server answers the view.", float(not snapshot["error"]))
        events = CounterMetricFamily("statsd_bn_events", "Events since the view started.", labels=("kind",))
        for kind, count in snapshot["counts"].items():
            events.add_metric((kind,), count)
        yield from (up, events)
        # The last numbers of an unreachable server would look like a stalled job.
        known = [] if snapshot["error"] else snapshot["groups"]
        groups = [group for group in known if "over" not in group]
        running = {group["job"] for group in groups}
        families: dict[str, Any] = {}
        for kind, metrics in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, (further, text) in metrics.items():
                families[name] = kind(f"statsd_bn_{name}", text, labels=("job", "group", *further.split()))
        for group in groups:
            for name, labels, number in _samples(group):
                families[name].add_metric((group["job"], group["group"], *labels), float(number))
        # Ended groups too: the ranks of a broken group leave within a second. A report may omit running groups.
        for group in () if snapshot.get("left_out") else known:
            if group["job"] not in running:
                families["broken"].add_metric((group["job"], group["group"]), float(bool(group["lost"])))
        yield from families.values()
        yield from (_histogram(groups, *named) for named in HISTOGRAMS.items())


def _samples(group: Group) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name, further labels and number of each metric of a group."""
    # Findings that the latest samples still show.
    differing = [one for one in group["findings"] if one["kind"] == "skew" and not one.get("cleared")]
    yield "rounds", (), group["rounds_done"]
    yield "rounds_failed", (), group["rounds_failed"]
    yield "members", (), int(count_here(group).partition(" ")[0])
    yield "world_size", (), group["world_size"]
    yield "non_finite", (), len(group.get("non_finite", ()))
    yield "findings", (), len(differing) + (held_share(group) >= MAX_DELAY_SHARE)
    yield "waiting_seconds", (), max((round_["seconds"] for round_ in group["waiting"]), default=0.0)
    yield "broken", (), bool(group["lost"])
    yield "severity", (group["verdict"]["state"],), group["verdict"]["severity"]
    if first := group["first_non_finite"]:
        yield "first_non_finite_step", (first["layer"], ",".join(map(str, first["ranks"]))), first["step"]
    latest = {(one["layer"], str(one["rank"])): one["variance"] for one in differing if "variance" in one}
    yield from (("finding_variance_ratio", labels, ratio) for labels, ratio in latest.items())
    for member in group["members"][:MAX_RANKS]:
        for name in (name for name in GAUGES if name.startswith("rank_")):
            if (number := member.get(FIELDS.get(name, name.removeprefix("rank_")))) is not None:
                yield name, (str(member["member"]),), number
    if figures := group.get("figures"):
        layers = zip(figures["layers"], figures["eta2"], strict=True)
        yield from (("skew_eta2", (name,), eta2) for name, eta2 in nlargest(MAX_LAYERS, layers, key=itemgetter(1)))


def _histogram(groups: list[Group], field: str, text: str) -> Metric:
    family = HistogramMetricFamily(f"statsd_bn_{field}", text, labels=("job", "group"))
    for group in groups:
        if histogram := group.get(field):
            # The report omits empty buckets at the end; a series needs all of them.
            up_to = accumulate(chain(histogram["counts"], repeat(0)))
            buckets = [(repr(bound), total) for bound, total in zip(BOUNDS, up_to, strict=False)]
            buckets.append(("+Inf", sum(histogram["counts"])))
            family.add_metric((group["job"], group["group"]), buckets, histogram["sum"])
    return family
