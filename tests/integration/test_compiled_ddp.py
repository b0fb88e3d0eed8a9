"""torch.compile under DistributedDataParallel with nothing configured, where torch cuts the network between buckets."""

import sys

import numpy as np
import pytest

from programs import compiled_ddp_program as program
from support.launched import PATIENT, Launched
from support.newer_torch import needs
from support.paths import ROOT
from support.whole_batch import assert_equal

SCRIPT = ROOT / "tests" / "programs" / "compiled_ddp_program.py"


@needs("several buckets compiled")
@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_network_of_several_buckets_trains_as_on_the_whole_batch(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    with Launched([*command, tmp_path / "saved.npz", "inductor"], PATIENT, tmp_path / "errors") as run:
        assert run.end(250.0) == 0, run.errors  # inductor's compilers take most of it
    saved = np.load(tmp_path / "saved.npz")
    expected = program.train_on_the_whole_batch()
    for wrapped in program.WRAPPED:
        assert saved[f"{wrapped}/parts"] > 2, "torch has not cut the network"
        assert_equal({name: saved[f"{wrapped}/{name}"] for name in expected}, expected, 1e-9)
