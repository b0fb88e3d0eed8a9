"""Restarts of an own server: rare failures are tolerated for hours, frequent ones end the restarts soon."""

import pytest

from client.launch.server_process import IMMEDIATE_RESTARTS, MAX_FAILED_STARTS, MAX_FAILURES, WINDOW_SECONDS, Restarts


def ends(every, times):
    restarts, now, pauses = Restarts(), 0.0, []
    for _ in range(times):
        now += every
        pauses.append(restarts.pause(now, has_listened=True))
        now += pauses[-1] or 0.0
        if pauses[-1] is None:
            break
    return pauses, now


def test_a_server_that_ends_every_minute_is_restarted_for_hours_without_a_pause():
    pauses, _ = ends(WINDOW_SECONDS, 600)
    assert pauses == [0.0] * 600


@pytest.mark.parametrize("every", [5.0, 10.0, 20.0])
def test_a_server_that_ends_every_few_seconds_is_restarted_with_pauses(every):
    pauses, _ = ends(every, 600)
    assert None not in pauses


def test_pauses_grow_until_too_many_failures_within_the_window_end_the_restarts():
    pauses, now = ends(0.5, 100)
    assert pauses == [0.0] * IMMEDIATE_RESTARTS + [1.0, 2.0, 4.0, 8.0, 16.0] + [None]
    assert len(pauses) == MAX_FAILURES + 1
    assert now < WINDOW_SECONDS


def test_a_server_that_never_listens_is_given_up_after_a_few_tries():
    restarts = Restarts()
    assert restarts.pause(0.0, has_listened=True) == 0.0
    for time in range(1, MAX_FAILED_STARTS):
        assert restarts.pause(float(time), has_listened=False) == 0.0
    assert restarts.pause(float(MAX_FAILED_STARTS), has_listened=False) is None


def test_a_failed_start_is_forgotten_once_the_server_listens():
    restarts = Restarts()
    for time in range(10):
        assert restarts.pause(100.0 * time, has_listened=time % 2 == 0) == 0.0
