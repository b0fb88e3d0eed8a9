"""A pass over the members follows the end of a connection, one for many ends, and another for what ended meanwhile."""

import math

from server.network.connections import PROBE_SECONDS, ProbeScheduler


def test_without_an_end_there_is_no_pass():
    assert not ProbeScheduler().start_if_due(1e9)


def test_many_ends_cost_one_pass_a_moment_after_the_first():
    probing = ProbeScheduler()
    for now in (10.0, 10.0 + PROBE_SECONDS / 2):
        probing.record_disconnect(now)
        assert not probing.start_if_due(now)
    assert probing.due == 10.0 + PROBE_SECONDS
    assert probing.start_if_due(10.0 + PROBE_SECONDS)
    assert probing.disconnected == 10.0 + PROBE_SECONDS / 2


def test_what_has_ended_since_a_pass_was_put_on_its_way_gets_another():
    probing = ProbeScheduler()
    probing.record_disconnect(10.0)
    probing.record_disconnect(10.02)
    assert probing.start_if_due(10.06)
    assert not probing.start_if_due(10.06)
    assert probing.start_if_due(10.02 + PROBE_SECONDS)
    assert probing.due == math.inf
