"""The recipe for Accelerate, in two processes, trains as one process does on the whole batch."""

import os
import sys

import pytest
import torch
from torch import nn

from support.launched import run_to_its_end
from support.paths import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.long]

EXAMPLES = ROOT / "examples"
STEPS = 20


@pytest.fixture(scope="module")
def recipe(server, tmp_path_factory):
    saved = tmp_path_factory.mktemp("accelerate") / "state.pt"
    environ = {**os.environ, "STATSD_BN_ENDPOINT": server.endpoint, "STATSD_BN_JOB": "accelerate"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = run_to_its_end(
        [*torchrun, EXAMPLES / "train_accelerate.py", "--steps", str(STEPS), "--save", saved], environ
    )
    return output, torch.load(saved)


@pytest.fixture
def whole_batch(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import digits  # noqa: PLC0415 - examples/ is no package, and on the path only here

    images, _ = digits.load()
    model = digits.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        mine = slice(step * digits.BATCH, (step + 1) * digits.BATCH)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images.pixels[mine]), images.labels[mine]).backward()
        optimizer.step()
    return model.state_dict()


def test_weights_and_running_statistics_are_those_of_the_whole_batch(recipe, whole_batch):
    _, state = recipe
    torch.testing.assert_close(state, dict(whole_batch), rtol=0, atol=1e-5)


def test_the_loss_is_printed_once(recipe):
    output, _ = recipe
    assert output.count(f"step {STEPS}: loss") == 1
    assert f"step {STEPS + 1}" not in output
