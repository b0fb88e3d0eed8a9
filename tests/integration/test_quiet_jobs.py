"""A healthy job that has no round for long is asked where its ranks are, and nothing follows from it."""

import sys

import pytest

from support.launched import Launched
from support.paths import TESTS

PROGRAM = TESTS / "programs" / "quiet_program.py"
RANKS = 3

# What a job does between two epochs, ten seconds each.
WAYS = (
    "save_a_checkpoint",
    "validate_with_broadcasts",
    "come_late_to_a_broadcast_of_buffers",
    "wait_in_a_smaller_group_first",
)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.long
def test_ranks_of_a_healthy_job_that_wait_long_in_collectives_are_asked_and_told_of_nothing(tmp_path):
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), PROGRAM, *WAYS)
    with Launched(command, {}, tmp_path / "errors") as run:
        said = [run.line("").split() for _ in range(RANKS * len(WAYS))]
        assert run.end() == 0, run.errors
        assert sorted((way, int(rank)) for way, rank, _ in said) == sorted(
            (way, rank) for way in WAYS for rank in range(RANKS)
        )
        # One that is not held up goes on at once to the next round.
        assert {way for way, _, what in said if what == "asked"} == set(WAYS)
        assert "deadlock: " not in run.errors
