"""Under DistributedDataParallel, on the CPU: members train as `nn.BatchNorm` does on the whole batch."""

import numpy as np
import pytest

from programs import ddp_programs
from programs.ddp_programs import STEPS, Training
from support.whole_batch import assert_equal

# In float64 the orders of summation differ by some 1e-16 per operation, and 20 steps of momentum carry that on to
# 1e-12 or so; a wrong weighting or statistic shows from 1e-3 on.
TOLERANCE = 1e-8

# Newer versions of torch say `forward_sync_buffers`; the older name means also not to broadcast at the beginning.
BROADCASTING = {"broadcast_buffers", "forward_sync_buffers"}.intersection(ddp_programs.options_of_ddp())

TRAININGS = {
    "plain": Training(),
    "3 unequal shards": Training(sizes=(1, 4, 2)),
    "no_sync": Training(micro_batches=2),
    "find_unused_parameters": Training(options=(("find_unused_parameters", True),), branch=True),
    "find_unused_parameters, no_sync": Training(
        options=(("find_unused_parameters", True),), branch=True, micro_batches=2
    ),
    "static_graph": Training(options=(("static_graph", True),)),
    "static_graph, no_sync": Training(options=(("static_graph", True),), micro_batches=2),
    "gradient_as_bucket_view, no_sync": Training(options=(("gradient_as_bucket_view", True),), micro_batches=2),
    **{f"{name}={on}": Training(options=((name, on),)) for name in sorted(BROADCASTING) for on in (True, False)},
    "broadcast_buffers=False, no_sync, 3 unequal shards": Training(
        sizes=(1, 4, 2), options=(("broadcast_buffers", False),), micro_batches=2
    ),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_after_20_steps_weights_and_buffers_are_those_of_the_whole_batch(members, tmp_path, training):
    found = members(len(training.sizes), ddp_programs.train, str(tmp_path / "store"), training)
    expected = ddp_programs.train_on_the_whole_batch(training)
    for state in found:
        assert_equal(state, expected, TOLERANCE)


def test_the_trainings_change_every_weight_and_use_every_layer():
    """Else equal would be easy."""
    for training in TRAININGS.values():
        before = ddp_programs.network(training).state_dict()
        for name, value in ddp_programs.train_on_the_whole_batch(training).items():
            assert np.abs(value - before[name].numpy()).max() > 1e-3, name
            if name.endswith("num_batches_tracked"):
                used = sum(step % 3 > 0 for step in range(STEPS)) if "branch" in name else STEPS
                assert value == used * training.micro_batches


def test_it_accepts_our_layers_on_the_cpu_where_it_refuses_torchs(members, tmp_path):
    for refused, accepted in members(2, ddp_programs.wrap, str(tmp_path / "store")):
        assert "SyncBatchNorm layers only work with GPU modules" in refused
        assert accepted == "DistributedDataParallel"
