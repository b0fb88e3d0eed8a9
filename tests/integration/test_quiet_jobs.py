"""A healthy job that has no round for long is asked where its ranks are, and nothing follows from it."""

import sys

import pytest

from support import newer_torch
from support.launched import Launched
from support.paths import TESTS

PROGRAM = TESTS / "programs" / "quiet_program.py"
RANKS = 3

# What a job does between two epochs, ten seconds each; the first ones are the likeliest to be taken for a mismatch.
WAYS = ("validate_with_broadcasts", "come_late_to_a_broadcast_of_buffers", "wait_in_a_smaller_group_first")
MORE_WAYS = ("save_a_checkpoint", "have_unequal_validation_data", "gather_an_object_that_takes_long", "gather_shards")


@pytest.mark.processes
@pytest.mark.timeout(300)
@newer_torch.needs("fully_shard")
@pytest.mark.long
@pytest.mark.parametrize("ways", [WAYS, MORE_WAYS])
def test_ranks_of_a_healthy_job_that_wait_long_in_collectives_are_asked_and_told_of_nothing(tmp_path, ways):
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), PROGRAM, *ways)
    with Launched(command, {}, tmp_path / "errors") as run:
        said = [run.line("").split() for _ in range(RANKS * len(ways))]
        assert run.end() == 0, run.errors
        assert sorted((way, int(rank)) for way, rank, _ in said) == sorted(
            (way, rank) for way in ways for rank in range(RANKS)
        )
        # One that is not held up goes on at once to the next round.
        assert {way for way, _, what in said if what == "asked"} == set(ways)
        assert "wait for one another" not in run.errors
