"""The contract with DistributedDataParallel: in each of its modes, ranks train as one process on the whole batch."""

import pytest
import torch

from programs import contract_ddp_programs as programs
from programs.ddp_programs import Mode, network
from support.comparison import assert_close, share_of

MODES = {
    "default": Mode(),
    "broadcast_buffers=False": Mode(options=(("broadcast_buffers", False),)),
    "static_graph": Mode(options=(("static_graph", True),)),
    "find_unused_parameters": Mode(options=(("find_unused_parameters", True),), branch=True),
    "no_sync": Mode(micro_batches=2),
    "gradient_as_bucket_view, no_sync": Mode(options=(("gradient_as_bucket_view", True),), micro_batches=2),
    "static_graph, no_sync": Mode(options=(("static_graph", True),), micro_batches=2),
    "unequal batches": Mode(shares=(1, 5)),
    "an empty batch": Mode(shares=(4, 0)),
}

# A rank has only its share of these values.
PER_SAMPLE = ("output", "input gradient")


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_ranks_train_as_one_process_on_the_whole_batch(ranks, mode, either):
    """Outputs, all gradients of each step, and the final state, which has the same bits on all ranks."""
    results = ranks(len(mode.shares), programs.under_ddp, mode, either)
    whole = programs.on_the_whole_batch(mode)
    for rank, found in enumerate(results):
        assert_close(found, share_of(whole, rank, mode.shares, PER_SAMPLE))
    assert list(programs.broken(results)) == []


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_mode_moves_all_weights_and_statistics(mode):
    """The test above could not find an error in values that never change."""
    before = programs.state(network(mode))
    for name, value in programs.on_the_whole_batch(mode).items():
        if name in before:
            assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("batches", [(2, 4), (3, 1), (2, 5, 3)])
def test_with_uneven_inputs_the_others_go_on_and_all_ranks_end_with_one_state(ranks, batches, connected):
    """Under `client.join` within torch's `Join`, for two passes."""
    results = ranks(len(batches), programs.with_uneven_inputs, batches, connected)
    expected = programs.with_uneven_inputs_together(batches)
    for found in results:
        assert_close(found, expected)
    assert list(programs.broken(results)) == []


def test_a_synchronised_step_leaves_the_wrappers_broadcast_of_buffers_on(ranks, connected):
    found = ranks(2, programs.means_after_an_evaluation, "trained under DDP", {}, connected)
    assert found == [[10.0, 10.0], [10.0, 10.0]]
