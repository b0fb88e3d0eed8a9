"""Members and a server on hosts of their own, in network namespaces; `scripts/test netns` runs all scenarios."""

import os
from pathlib import Path

import pytest

from chaos.chaos_world import Finding
from netns.netns_scenarios import SCENARIOS, WORLD, weather
from netns.netns_world import reason_to_skip

pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    # Another run of the tests beside this one has its own.
    ours = f"statsd-bn-{os.getpid()}-*"
    assert not [path.name for path in Path("/run/netns").glob(ours)]
    assert not list(Path("/etc/netns").glob(ours))


@pytest.mark.long
def test_on_a_bad_network_the_weights_are_those_of_a_clean_one():
    result = weather(10, delay=0.005, jitter=0.004, lost=0.05, held=0.1, doubled=0.1)(seed=1)
    assert result.identical
    assert result.dropped > 0


@pytest.mark.long
def test_a_member_that_is_cut_off_for_ever_is_named():
    assert SCENARIOS["partition for ever"](0).identical is None


@pytest.mark.long
def test_a_scenario_finds_what_is_wrong(monkeypatch):
    """Other weights, and an error that nobody expects."""
    monkeypatch.setattr("netns.netns_scenarios.undisturbed", lambda _: ("other",) * WORLD)
    with pytest.raises(Finding, match="not those of an undisturbed run"):
        weather(2)(seed=0)
