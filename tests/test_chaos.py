"""Chaos with real processes: members and the server are killed, stopped, stuck and cut off while real layers train.

A scenario raises a `Finding` where a promise is not kept. How long each may take is measured by `scripts/chaos`; here
it is only not for ever.
"""

import functools
import random
import tempfile
import time
from pathlib import Path

import pytest

import chaos_scenarios
from chaos_world import STARTER, descendants

SOON = 20.0


@pytest.fixture(scope="module", autouse=True)
def _starter():
    """What starts the members lives on; so does the undisturbed run, which is made once."""
    process = STARTER.Process(target=int)
    process.start()
    process.join(SOON)
    chaos_scenarios.undisturbed()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = descendants()
    yield
    left = descendants() - before
    assert left == set(), [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


@pytest.fixture
def folder():
    """With a name short enough for an ipc socket."""
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("scenario", chaos_scenarios.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_chaos(scenario, seed, folder):
    started = time.monotonic()
    print(scenario(random.Random(seed), folder), time.monotonic() - started)
