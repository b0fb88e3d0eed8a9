import json
import re
import shutil
import subprocess
from collections import Counter

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra view")
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.view.metrics import MAX_LAYERS, MAX_RANKS, Metrics
from server.view.snapshot import SnapshotBuilder
from statsd_bn.timing import BOUNDS
from support.paths import ROOT
from support.view_reports import ended, figures, group, layer, member, report, skew

NAMED = {"job": 'a "job"\n\\ <script>', "group": "world"}
HISTOGRAM = {"counts": [3, 2, *[0] * (len(BOUNDS) - 2), 1], "sum": 0.5}


def samples(*reports):
    watcher = SnapshotBuilder("x")
    for second, status in enumerate(reports):
        snapshot = watcher.update(float(second), status)
    text = generate_latest(Metrics(snapshot)).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(of, name, **labels):
    found = [s.value for s in of if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_prometheus_own_parser_reads_the_metrics_of_a_group():
    pace = {"waiting": 0.2, "score": 0.5}
    world = group(
        member(0, **pace), **NAMED, rounds_failed=3, non_finite=["x"], round_seconds=HISTOGRAM, late_seconds=HISTOGRAM
    )
    of = samples(report(), report(world))
    assert value(of, "statsd_bn_up") == 1
    assert value(of, "statsd_bn_rounds_total", **NAMED) == 100
    assert value(of, "statsd_bn_rounds_failed_total", **NAMED) == 3
    assert value(of, "statsd_bn_members", **NAMED) == 1
    assert value(of, "statsd_bn_non_finite", **NAMED) == 1
    assert value(of, "statsd_bn_rank_waiting", rank="0") == 0.2
    assert value(of, "statsd_bn_rank_score", rank="0") == 0.5
    assert value(of, "statsd_bn_events_total", kind="joined") == 1
    buckets = {s.labels["le"]: s.value for s in of if s.name == "statsd_bn_round_seconds_bucket"}
    assert list(buckets.values()) == [3, *[5] * (len(BOUNDS) - 1), 6]
    assert [float(bound) for bound in buckets] == [*BOUNDS, float("inf")]
    assert value(of, "statsd_bn_late_seconds_count", **NAMED) == 6
    assert value(of, "statsd_bn_round_seconds_count", **NAMED) == 6
    assert value(of, "statsd_bn_round_seconds_sum", **NAMED) == 0.5


def test_round_trips_are_a_histogram_of_their_own_from_20_microseconds_on():
    trips = {"counts": [7, 1], "sum": 2e-4}
    of = samples(report(group(member(3, round_trip={"median": 2e-5, "p99": 4e-5}), **NAMED, round_trip_seconds=trips)))
    buckets = {float(s.labels["le"]): s.value for s in of if s.name == "statsd_bn_round_trip_seconds_bucket"}
    assert list(buckets.items())[:3] == [(20e-6, 7), (40e-6, 8), (80e-6, 8)]
    assert value(of, "statsd_bn_round_trip_seconds_sum", **NAMED) == 2e-4
    assert value(of, "statsd_bn_rank_round_trip_seconds", rank="3") == 4e-5
    assert not any(s.name.startswith("statsd_bn_round_seconds") for s in of)


def test_the_verdict_and_its_numbers_are_metrics():
    first = {"layer": "bn1", "phase": "forward", "step": 20, "ranks": [2], "channels": 1, "of": 4, "what": "NaN"}
    found = {"first_non_finite": first, "findings": [skew(1), skew(0, cleared=True)], "slowest": 1, "held": 0.25}
    world = group(member(0, round_trip={"median": 2e-5, "p99": 4e-5}), member(1), **NAMED, **found)
    of = samples(report(world))
    assert value(of, "statsd_bn_severity", state="data", **NAMED) == 3
    assert value(of, "statsd_bn_first_non_finite_step", layer="bn1", rank="2", **NAMED) == 20
    assert value(of, "statsd_bn_finding_variance_ratio", layer="bn1", rank="1", **NAMED) == 8.5
    assert value(of, "statsd_bn_findings", **NAMED) == 2
    assert value(of, "statsd_bn_rank_awaited", rank="1") == 0.25
    assert value(of, "statsd_bn_rank_awaited", rank="0") == 0
    assert value(of, "statsd_bn_rank_round_trip_median_seconds", rank="0") == 2e-5
    healthy = samples(report(group(member(0))))
    assert value(healthy, "statsd_bn_severity", state="healthy") == 0
    assert value(healthy, "statsd_bn_findings") == 0


def test_an_ended_group_has_no_series_but_its_end():
    of = samples(report(group(member(0), **NAMED)), report())
    assert not any(s.name in {"statsd_bn_severity", "statsd_bn_members"} for s in of)


def test_labels_are_bounded():
    of = samples(report(group(*(member(rank) for rank in range(1000)))))
    assert sum(s.name == "statsd_bn_rank_step" for s in of) == MAX_RANKS


def test_the_most_skewed_layers_have_a_series():
    layers = [layer(f"bn{number}", number / 1000, 0.0) for number in range(100)]
    of = samples(report(group(figures=figures(*layers), **NAMED), group(job="other")))
    assert value(of, "statsd_bn_skew_eta2", layer="bn99", **NAMED) == 0.099
    assert value(of, "statsd_bn_skew_eta2", layer="bn80", **NAMED) == 0.08
    assert sum(s.name == "statsd_bn_skew_eta2" for s in of) == MAX_LAYERS


def test_a_short_histogram_is_extended_to_all_buckets():
    of = samples(report(group(member(0), round_seconds={"counts": [4], "sum": 1e-5})))
    buckets = [s.value for s in of if s.name == "statsd_bn_round_seconds_bucket"]
    assert buckets == [4] * (len(BOUNDS) + 1)


def test_a_silent_server_has_no_stale_numbers():
    watcher = SnapshotBuilder("x")
    watcher.update(0.0, report(group(member(0))))
    snapshot = watcher.fail(1.0, "no answer")
    text = generate_latest(Metrics(snapshot)).decode()
    assert "statsd_bn_up 0.0" in text
    assert "statsd_bn_rounds_total{" not in text


def test_the_dashboard_and_the_rules_use_existing_metrics():
    paced = member(0, waiting=0.2, score=0.5, round_trip={"median": 2e-5, "p99": 4e-5})
    pace = {"slowest": 0, "held": 0.1}
    of = group(paced, round_seconds=HISTOGRAM, round_trip_seconds=HISTOGRAM, figures=figures(layer("bn", 0.1)), **pace)
    metrics = {sample.name for sample in samples(report(), report(of))}
    folder = ROOT / "docker/monitoring"
    board = json.loads((folder / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    queries += re.findall(r"expr: (.*)", (folder / "alerts.yml").read_text())
    names = [re.findall(r"statsd_bn_\w+", expression) for expression in queries]
    assert len(names) > 15
    assert all(len(found) == 1 and set(found) <= metrics for found in names), names
    used_twice = {name for name, times in Counter(found for of in names for found in set(of)).items() if times > 1}
    assert {"statsd_bn_findings", "statsd_bn_non_finite", "statsd_bn_broken"} <= used_twice, "by board and rules"
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(not PROMTOOL, reason="needs promtool, of Debian's package prometheus")
def test_promtool_accepts_the_metrics_and_the_rules():
    one = member(0, round_trip={"median": 2e-5, "p99": 4e-5})
    times = {"round_seconds": HISTOGRAM, "round_trip_seconds": HISTOGRAM}
    snapshot = SnapshotBuilder("x").update(0.0, report(group(one, **times, figures=figures(layer("bn", 0.1)))))
    text = generate_latest(Metrics(snapshot))
    # The exit code is 3 where promtool only advises, so 0 says that it has no advice either.
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
    assert checked.returncode == 0, (checked.stdout + checked.stderr).decode()
    rules = str(ROOT / "docker/monitoring/alerts.yml")
    checked = subprocess.run([PROMTOOL, "check", "rules", rules], capture_output=True, check=False)
    assert checked.returncode == 0, (checked.stdout + checked.stderr).decode()
    assert b"SUCCESS" in checked.stdout


@pytest.mark.skipif(not PROMTOOL, reason="needs promtool, of Debian's package prometheus")
def test_each_rule_fires_for_a_job_in_trouble_and_none_for_a_healthy_one():
    rules = str(ROOT / "tests/unit/view/alerts_test.yml")
    result = subprocess.run([PROMTOOL, "test", "rules", rules], capture_output=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr).decode()


def test_the_test_of_the_rules_covers_all_of_them():
    names = re.findall(r"alert: (\w+)", (ROOT / "docker/monitoring/alerts.yml").read_text())
    tested = re.findall(r'alertname="(\w+)"', (ROOT / "tests/unit/view/alerts_test.yml").read_text())
    assert sorted(tested) == sorted(names)


def test_an_ended_job_is_still_reported_as_broken():
    ends = [ended("sick", "rank 0 failed"), ended("sick"), ended("well"), ended("again", "rank 1 failed")]
    of = samples(report(group(member(0), job="again"), ended=ends))
    broken = {job: value(of, "statsd_bn_broken", job=job, group="world") for job in ("sick", "well", "again")}
    assert broken == {"sick": 1, "well": 0, "again": 0}
    cut = samples(report(group(member(0), job="again"), ended=ends, left_out=1))
    assert [sample.labels["job"] for sample in cut if sample.name == "statsd_bn_broken"] == ["again"]
