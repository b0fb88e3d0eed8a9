"""Members and a server on hosts of their own, in network namespaces; `scripts/test netns` runs all scenarios."""

import os
from pathlib import Path

import pytest

from netns.netns_scenarios import SCENARIOS
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
def test_a_member_that_is_cut_off_for_ever_is_named():
    assert SCENARIOS["partition for ever"]().identical is None
