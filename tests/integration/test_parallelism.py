"""Sharded parameters and pipelines on the CPU: members train as `nn.BatchNorm` does on the whole batch."""

import numpy as np
import pytest
import torch
from torch import nn

from programs import fsdp_programs, pipelining_programs
from programs.ddp_programs import train_on_the_whole_batch
from programs.member_programs import state
from programs.pipelining_programs import SCHEDULES, SHARES, STAGES, STEPS
from statsd_bn.text import unwrap
from support.newer_torch import needs
from support.whole_batch import assert_equal

# In 20 steps with momentum, rounding errors of 1e-16 grow to about 1e-12.
TOLERANCE = 1e-8


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[needs("fully_shard")] if "fully_shard" in way else []) for way in fsdp_programs.WAYS],
)
def test_after_20_steps_weights_and_buffers_are_those_of_the_whole_batch(members, tmp_path, way):
    found = members(2, fsdp_programs.train, str(tmp_path / "store"), way)
    model, _ = train_on_the_whole_batch(fsdp_programs.MODE, fsdp_programs.STEPS)
    for one in found:
        assert_equal(one, state(model), TOLERANCE)


@pytest.mark.parametrize("way", fsdp_programs.WAYS)
def test_sharded_layers_are_left_unchanged_and_reported(members, tmp_path, way):
    for (converting, conversion_warnings), (reverting, reversion_warnings) in members(
        2, fsdp_programs.convert_what_is_sharded, str(tmp_path / "store"), way
    ):
        assert converting
        assert reverting
        assert [len(conversion_warnings), len(reversion_warnings)] == [1, 1]
        assert "stem.1' (" in reversion_warnings[0]
        assert ") and 1 more of its class, '" in reversion_warnings[0]
        assert "head.2' (" in reversion_warnings[0]
        assert "left 3 layers unsynchronised: '" in conversion_warnings[0]
        assert "sharded by FSDP; convert the model first" in conversion_warnings[0]


def test_a_distributed_input_is_refused_and_its_local_part_is_accepted(members, tmp_path):
    found = members(2, fsdp_programs.give_a_dtensor, str(tmp_path / "store"))
    expected = nn.BatchNorm1d(2)(torch.arange(8.0).view(4, 2)).detach()
    for error, _ in found:
        assert "expected a local input and local parameters, got a DTensor" in unwrap(error)
    torch.testing.assert_close(torch.cat([part for _, part in found]), expected)


def test_a_submodule_of_a_sharded_model_is_left_unchanged_as_well(members, tmp_path):
    for is_left, warnings in members(2, fsdp_programs.convert_a_part, str(tmp_path / "store")):
        assert is_left
        assert [text.partition(". ")[0] for text in warnings] == [
            "convert_model left 1 layer unsynchronised: '1' (BatchNorm2d: sharded by FSDP; convert the model first)"
        ]


@needs("torch.distributed.pipelining")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_several_members_train_as_one_process_with_all_micro_batches(members, tmp_path, schedule):
    expected = pipelining_programs.train_micro_batch_by_micro_batch()
    for number, found in members(SHARES * STAGES, pipelining_programs.train, str(tmp_path / "store"), schedule):
        assert_equal(found, expected[number], 1e-10)


@needs("torch.distributed.pipelining")
def test_the_training_changes_every_weight_and_buffer():
    for number, found in enumerate(pipelining_programs.train_micro_batch_by_micro_batch()):
        before = pipelining_programs.stage(number).state_dict()
        for name, value in found.items():
            if name.endswith("num_batches_tracked"):
                assert value == STEPS, name
            else:
                assert np.abs(value - before[name].numpy()).max() > 1e-3, name
