"""The last hour of each layer stays within its bounds, and comes back as it was."""

import tracemalloc

import numpy as np
import pytest

from server.view.history import History
from support.view_reports import figures_of, group, member, report

HOUR = 3600


def snapshot(time, layers=("bn1",), members=3, error="", job="digits", value=None):
    told = figures_of(layers, members, mean=time if value is None else value)
    return {**report(group(member(0), job=job, figures=told)), "time": float(time), "error": error}


def test_a_layer_comes_back_with_its_times():
    history = History()
    history.add(snapshot(1, ["bn1", "bn2"], value=0.5))
    history.add(snapshot(2, ["bn0", "bn1"], value=1.5))  # a layer came in before
    told = history.layer("digits", "world", "bn1")
    assert told["times"] == [1.0, 2.0]
    assert told["means"] == [[0.5, 1.5, 2.5], [11.5, 12.5, 13.5]]
    assert told["variances"] == [[1.0, 1.0, 1.0]] * 2
    assert told["eta2"] == [0.25, 0.25]
    assert history.layer("digits", "world", "bn2")["times"] == [1.0]
    assert history.layer("digits", "world", "bn3") is None
    assert history.layer("other", "world", "bn1") is None


def test_moments_are_fewer_the_older_they_are():
    history = History()
    for time in range(2 * HOUR):
        history.add(snapshot(time))
    ages = 2 * HOUR - 1 - np.array(history.layer("digits", "world", "bn1")["times"])
    assert [int(ages[0]) > HOUR - 120, int(ages[0]) <= HOUR] == [True, True]
    gaps = -np.diff(ages)
    assert set(gaps[ages[1:] < 60]) == {1.0}
    assert (gaps[(ages[:-1] < 600) & (ages[1:] > 70)] == 10.0).all()
    assert (gaps[(ages[:-1] <= HOUR) & (ages[1:] > 660)] == 60.0).all()
    assert 160 < len(ages) < 175


def test_without_room_there_are_fewer_moments_of_the_whole_hour():
    history = History(most_bytes=40 * 4 * (2 * 3 + 1))  # 40 of 170 moments
    for time in range(HOUR):
        history.add(snapshot(time))
        assert history.size <= 40 * 4 * (2 * 3 + 1)
    times = history.layer("digits", "world", "bn1")["times"]
    assert len(times) > 20
    assert times[0] < 600
    assert times[-1] > HOUR - 10


def test_a_group_that_does_not_fit_at_all_is_left_out():
    history = History(most_bytes=60)
    history.add(snapshot(1, members=100))
    assert history.size == 0
    history.add(snapshot(2))
    assert history.layer("digits", "world", "bn1")["times"] == [2.0]


@pytest.mark.timeout(10)
def test_where_two_moments_do_not_fit_the_newest_stays():
    history = History(most_bytes=40)  # a moment takes 28
    for time in (1, 2, 3):
        history.add(snapshot(time))
    assert history.layer("digits", "world", "bn1")["times"] == [3.0]


def test_an_hour_after_its_end_a_job_is_forgotten():
    history = History()
    history.add(snapshot(0))
    history.add(snapshot(HOUR, job="other"))
    assert history.layer("digits", "world", "bn1")
    history.add(snapshot(HOUR + 1, job="other"))
    assert history.layer("digits", "world", "bn1") is None


def test_another_number_of_members_begins_anew():
    history = History()
    history.add(snapshot(1, members=3))
    history.add(snapshot(2, members=4))
    assert history.layer("digits", "world", "bn1")["times"] == [2.0]


def test_a_clock_that_is_set_back_stops_nothing_and_takes_the_moments_along():
    history = History()
    for time in (7200, 7201, 7202, 3600, 3601, 3602):
        history.add(snapshot(time, value=time))
    told = history.layer("digits", "world", "bn1")
    assert told["times"] == [3598.0, 3599.0, 3600.0, 3601.0, 3602.0]
    assert [means[0] for means in told["means"]] == [7200.0, 7201.0, 7202.0, 3601.0, 3602.0]


def test_while_the_server_is_silent_nothing_is_kept():
    history = History()
    history.add(snapshot(1))
    history.add(snapshot(5, error="no answer"))
    assert history.layer("digits", "world", "bn1")["times"] == [1.0]


def test_a_value_beyond_float32_is_the_greatest_one():
    history = History()
    history.add(snapshot(1, value=1e300))
    assert history.layer("digits", "world", "bn1")["means"][0][0] == pytest.approx(3.4028235e38)


def test_a_great_job_stays_within_its_room():
    told = figures_of([f"layer{at}" for at in range(200)], 1000)
    shown = {**report(group(member(0), figures=told)), "error": ""}
    history = History()
    tracemalloc.start()
    try:
        for time in range(0, HOUR, 20):  # what is between makes no difference to what is kept for long
            history.add({**shown, "time": float(time)})
        for time in range(HOUR, HOUR + 60):
            history.add({**shown, "time": float(time)})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert history.size > 50e6
    assert peak < 200e6
