"""The soak of shared memory, for some seconds; `scripts/chaos soak` has rounds by the million."""

import random

import pytest

from chaos import soak
from chaos.chaos_world import Finding
from chaos.killed_ranks import JOBS, RANKS, kill_ranks
from client.session.protocol.member import TRANSPORTS
from client.transports import group_memory, negotiation
from support import starter

NEEDS_MEMORY = pytest.mark.skipif(
    bool(group_memory.unavailable_reason()) or negotiation.platform.machine() not in negotiation.TESTED_MACHINES,
    reason="shared memory is not used here",
)

ROUNDS = 3000


@pytest.fixture(autouse=True, scope="module")
def _warm():
    starter.warm_up()


@NEEDS_MEMORY
def test_every_round_has_the_right_bits_through_all_restarts_of_the_server():
    soaked = soak.soak(3, ROUNDS, kill_seconds=1.0, rank_seconds=1e6, chance=random.Random(1))
    assert (soaked.rounds, soaked.rank_kills) == (ROUNDS, 0)
    assert soaked.server_kills >= 1
    # The other rounds had a long wait, or rows that do not fit into shared memory.
    assert soaked.in_memory > ROUNDS // 2
    assert soaked.over_server >= 1


@NEEDS_MEMORY
def test_the_others_name_a_killed_rank_and_a_new_job_continues():
    soaked = soak.soak(2, 4 * ROUNDS, kill_seconds=1e6, rank_seconds=0.3, chance=random.Random(2))
    assert soaked.rounds == 4 * ROUNDS
    assert soaked.rank_kills >= 1


@NEEDS_MEMORY
def test_killed_members_leave_nothing_behind():
    assert soak.kill_all(2) == 2


@NEEDS_MEMORY
def test_memory_in_use_by_a_process_is_found(monkeypatch):
    """Otherwise the test above could not fail."""
    offer = group_memory.MemoryOffer(2**16)
    try:
        monkeypatch.setattr(soak, "MEMORY", "memfd:statsd_bn")
        (mine,) = soak.memories_of(soak.os.getpid())
        monkeypatch.setattr(soak, "memories_of", lambda _: {mine})
        with pytest.raises(Finding, match="have the memory still"):
            soak.kill_all(1)
    finally:
        offer.close()


@pytest.mark.parametrize(
    ("with_keys", "kills"),
    [
        pytest.param(True, 2 * JOBS * RANKS, id="a few"),
        pytest.param(True, 200, id="keys", marks=pytest.mark.long),
        pytest.param(False, 200, id="ipc", marks=pytest.mark.long),
    ],
)
def test_no_killed_rank_ends_the_server(with_keys, kills):
    killed = kill_ranks(kills, with_keys=with_keys, chance=random.Random(kills))
    assert killed.total() >= kills
    assert set(killed) == set(TRANSPORTS)
