"""torchvision's training script, changed as docs/frameworks.md says, equals one process on the whole batch."""

import importlib.util
import os
import sys

import pytest
import torch

from support.launched import run_to_its_end
from support.paths import TESTS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),  # the first test waits for two trainings
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("presets") is None,
        reason="needs torchvision and its references, see docs/frameworks.md#what-is-tested",
    ),
]

BATCH = 8
STEPS = 4  # two epochs
TOLERANCE = 1e-9  # in float64, after all steps


def train(folder, ranks, **environ):
    folder.mkdir()
    ours = {key: value for key, value in os.environ.items() if not key.startswith("STATSD_BN_")}
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    program = TESTS / "frameworks" / "torchvision_program.py"
    run_to_its_end(
        [sys.executable, *torchrun, program, folder, str(BATCH // ranks)], {**ours, "OMP_NUM_THREADS": "1", **environ}
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def furthest(found, expected):
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    (found,) = train(tmp_path_factory.mktemp("whole") / "run", 1, PLAIN="yes")
    return found


def test_two_processes_train_like_one_process_on_the_whole_batch(tmp_path, whole):
    first, second = train(tmp_path / "run", 2)
    assert len(first["steps"]) == STEPS
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, whole, rtol=TOLERANCE, atol=TOLERANCE)
    assert furthest(whole["steps"][-1], whole["steps"][0]) > 1e-2  # the weights moved


def test_without_the_recipe_the_ranks_differ(tmp_path, whole):
    first, second = train(tmp_path / "run", 2, PLAIN="yes")
    assert furthest(first["state"], whole["state"]) > 1e-2
    for one, other, expected in zip(first["steps"], second["steps"], whole["steps"], strict=True):
        assert furthest(one, other) > 1e-3
        assert furthest(one, expected) > 1e-3
