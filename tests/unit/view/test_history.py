"""Trends and layers over the last ten minutes, in bounded memory."""

import base64

import numpy as np
import pytest

from server.view.history import INTERVAL_SECONDS, SECONDS, LayerHistory, Trend
from server.view.snapshot import SnapshotBuilder, heat
from support.view_reports import figures, group, layer, member, report


def unpack(text, *shape):
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


def test_a_trend_has_the_growth_of_rounds_and_the_percentiles_of_new_round_trips():
    trend = Trend()
    trend.add(0.0, group(rounds_done=100, round_trip_seconds={"counts": [50]}))
    trend.add(1.0, group(rounds_done=999, round_trip_seconds={"counts": [50]}))
    trend.add(4.0, group(rounds_done=500, round_trip_seconds={"counts": [50, 0, 9, 1]}))
    trend.add(8.0, group(rounds_done=500, round_trip_seconds={"counts": [50, 0, 9, 1]}))
    assert trend.entry == {
        "seconds": [4.0, 8.0],
        "rounds_per_second": [100.0, 0.0],
        "median": [80e-6, 0.0],
        "p99": [160e-6, 0.0],
    }


def test_a_trend_keeps_ten_minutes_and_survives_a_server_that_counts_anew():
    trend = Trend()
    for second in range(2000):
        trend.add(float(second), group(rounds_done=second % 500, round_trip_seconds={"counts": [second % 500]}))
    entry = trend.entry
    assert len(entry["seconds"]) == SECONDS / INTERVAL_SECONDS <= 300
    assert min(entry["rounds_per_second"]) >= 0.0


def test_a_trend_knows_roughly_when_a_step_was():
    trend = Trend()
    for second, step in ((0, 5), (4, 10), (8, 30), (12, 30), (16, 30), (20, 31)):
        trend.add(float(second), group(member(0, step=step), member(1, step=step - 1)))
    assert [trend.time_of(step) for step in (5, 10, 20, 30, 31, 32)] == [None, None, 6.0, 8.0, 20.0, None]


def layers(now, members=3, number=2):
    names = [f"bn{place}" for place in range(number)]
    return {"layers": names, "means": [[now] * members] * number, "variances": [[now + 1] * members] * number}


def test_a_layer_has_its_means_and_variances_of_ten_minutes():
    history = LayerHistory()
    for second in range(1000):
        history.add(float(second), layers(second), 2**20)
    series = history.of_layer("bn1")
    times = series["seconds"]
    assert times[0] >= 999 - SECONDS - INTERVAL_SECONDS
    assert times[-1] >= 999 - INTERVAL_SECONDS
    assert unpack(series["means"], len(times), 3).tolist() == [[time] * 3 for time in times]
    assert unpack(series["variances"], len(times), 3)[0].tolist() == [times[0] + 1] * 3
    assert history.of_layer("other") is None


@pytest.mark.parametrize("members", [10, 100])
def test_a_large_group_is_sampled_less_often(members):
    history, size = LayerHistory(), 2 * 4 * 2 * members
    for second in range(1200):
        history.add(float(second), layers(second, members), 20 * size)
    times = history.of_layer("bn0")["seconds"]
    assert len(times) <= 21
    assert times[-1] - times[0] >= SECONDS * 0.9, "coarser, not shorter"


def test_other_members_begin_a_new_history():
    history = LayerHistory()
    history.add(0.0, layers(0.0, 3), 2**20)
    history.add(10.0, layers(10.0, 4), 2**20)
    assert history.of_layer("bn0")["seconds"] == [10.0]


def test_a_snapshot_builder_has_the_history_of_its_groups():
    builder = SnapshotBuilder("x")
    for second in range(17):
        # The server has new figures until second 8.
        changed = {"variances": [1.0, 1.0 + min(second, 8)]}
        of = group(member(0), member(1), figures=figures(layer("bn1", 0.1, 0.2) | changed))
        builder.update(float(second), report(of))
    history = builder.history("digits", "world", "bn1")
    assert (history["seconds"], history["ranks"]) == ([0.0, 4.0, 8.0], [0, 1])
    assert builder.history("digits", "world", "bn2") is None
    assert builder.history("other", "world", "bn1") is None
    builder.update(700.0, report(of))
    assert builder.history("digits", "world", "bn1")["seconds"] == [8.0], "the latest sample stays"
    builder.update(701.0, report())
    assert builder.history("digits", "world", "bn1")["ranks"] == [0, 1], "an ended group keeps its history"


@pytest.mark.parametrize("members", [1, 2, 3, 4, 7])
def test_the_heat_has_the_ratio_of_each_variance_to_the_median_of_the_others(members):
    variances = np.random.default_rng(members).uniform(0.5, 2.0, (2, members))
    of = [
        {"name": f"bn{place}", "eta2": 0.1, "parts": row * 0, "means": row, "variances": row}
        for place, row in enumerate(variances)
    ]
    heatmap = heat(SnapshotBuilder("x").update(0.0, report(group(figures=figures(*of)))), "digits", "world")
    ratios = unpack(heatmap["ratios"], 2, members)
    for row, found in zip(variances, ratios, strict=True):
        expected = [row[at] / np.median(np.delete(row, at)) if members > 1 else 1.0 for at in range(members)]
        assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert unpack(heatmap["means"], 2, members).tolist() == pytest.approx(variances.astype("f4"))
