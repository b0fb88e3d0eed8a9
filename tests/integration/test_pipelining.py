"""Pipelines of torch.distributed.pipelining: each stage's members train as one process does with all micro-batches."""

import numpy as np
import pytest

from programs import pipelining_programs
from programs.pipelining_programs import SCHEDULES, SHARES, STAGES, STEPS
from support.newer_torch import needs
from support.whole_batch import assert_equal

TOLERANCE = 1e-10

pytestmark = needs("torch.distributed.pipelining")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_several_members_train_as_one_process_with_all_micro_batches(members, tmp_path, schedule):
    expected = pipelining_programs.train_micro_batch_by_micro_batch()
    for number, state in members(SHARES * STAGES, pipelining_programs.train, str(tmp_path / "store"), schedule):
        assert_equal(state, expected[number], TOLERANCE)


def test_the_training_changes_all_there_is():
    """Else equal would be easy."""
    for number, state in enumerate(pipelining_programs.train_micro_batch_by_micro_batch()):
        before = pipelining_programs.stage(number).state_dict()
        for name, value in state.items():
            if name.endswith("num_batches_tracked"):
                assert value == STEPS, name
            else:
                assert np.abs(value - before[name].numpy()).max() > 1e-3, name
