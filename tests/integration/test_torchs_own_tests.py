"""Torch's own distributed tests of its synchronised layer pass on ours, over each transport."""

import sys

import pytest

from support.launched import Launched
from support.paths import ROOT
from support.torchs_own_tests import names_for
from support.transports import TRANSPORTS


@pytest.mark.long
@pytest.mark.parametrize("nr_ranks", [2, 3])
def test_torchs_own_tests_pass(tmp_path, nr_ranks):
    script = ROOT / "tests" / "programs" / "torchs_own_tests.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nr_ranks), script]
    with Launched(command, {}, tmp_path / "errors") as run:
        for transport in TRANSPORTS:
            for name in names_for(nr_ranks):
                run.line(f"{transport}: {name}")
        assert run.end() == 0, run.errors
