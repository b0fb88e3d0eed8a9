"""Ranks killed in rows; `scripts/chaos kills 1000` kills more."""

import random

import pytest

from chaos.killed_ranks import JOBS, RANKS, kill_ranks
from client.session.protocol.member import TRANSPORTS
from support import starter


@pytest.mark.parametrize(
    ("with_keys", "kills"),
    [
        pytest.param(True, 2 * JOBS * RANKS, id="a few"),
        pytest.param(True, 200, id="keys", marks=pytest.mark.long),
        pytest.param(False, 200, id="ipc", marks=pytest.mark.long),
    ],
)
def test_no_killed_rank_ends_the_server(with_keys, kills):
    starter.warm_up()
    killed = kill_ranks(kills, with_keys=with_keys, chance=random.Random(kills))
    assert killed.total() >= kills
    assert set(killed) == set(TRANSPORTS)
