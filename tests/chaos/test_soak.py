"""The soak of shared memory, for some seconds; `scripts/chaos soak` has rounds by the million."""

import random

import pytest

from chaos import soak
from chaos.chaos_world import Finding
from client.transports import memfd, negotiation
from support import starter

pytestmark = [
    pytest.mark.skipif(bool(memfd.unavailable_reason()), reason=memfd.unavailable_reason()),
    pytest.mark.skipif(
        negotiation.platform.machine() not in negotiation.TESTED_MACHINES, reason="it is not chosen by itself here"
    ),
]

ROUNDS = 3000


@pytest.fixture(autouse=True, scope="module")
def _warm():
    starter.warm_up()


def test_every_round_has_the_right_bits_whatever_becomes_of_the_server():
    soaked = soak.soak(3, ROUNDS, kill_seconds=1.0, rank_seconds=1e6, chance=random.Random(1))
    assert (soaked.rounds, soaked.rank_kills) == (ROUNDS, 0)
    assert soaked.server_kills >= 1
    # The rest are those of which somebody has waited for long, or which do not fit.
    assert soaked.in_memory > ROUNDS // 2
    assert soaked.over_server >= 1


def test_the_others_name_a_rank_that_is_killed_and_a_new_job_goes_on():
    soaked = soak.soak(2, 4 * ROUNDS, kill_seconds=1e6, rank_seconds=0.3, chance=random.Random(2))
    assert soaked.rounds == 4 * ROUNDS
    assert soaked.rank_kills >= 1


def test_nothing_is_left_of_members_that_are_killed():
    assert soak.kill_all(2) == 2


def test_memory_that_somebody_still_has_is_found(monkeypatch):
    """Otherwise the test above could not fail."""
    offer = memfd.MemoryOffer(2**16)
    try:
        monkeypatch.setattr(soak, "MEMORY", "memfd:statsd_bn")
        (mine,) = soak.memories_of(soak.os.getpid())
        monkeypatch.setattr(soak, "memories_of", lambda _: {mine})
        with pytest.raises(Finding, match="have the memory still"):
            soak.kill_all(1)
    finally:
        offer.close()
