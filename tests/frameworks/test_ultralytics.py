"""Ultralytics' trainer with the recipe's callbacks, in two processes on the CPU.

The trainer divides a rank's loss by the weight of the labels in its share, so the one process that the ranks are
compared with adds the losses of the shares.
"""

import importlib.util
import os
import sys

import pytest
import torch

from support.launched import run_to_its_end
from support.paths import TESTS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("ultralytics") is None,
        reason="needs ultralytics, see docs/frameworks.md#what-is-tested",
    ),
]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

# In float32, after the first step and after the last. On one machine the running statistics differed by 4e-7, then by
# 1e-4, and the last weights by 6e-5. Without synchronisation these differences were 4e-2, 8e-2 and 2e-2.
TOLERANCE = 1e-4
LAST_TOLERANCE = 1e-3


def train(folder, **environ):
    """Trains offline, without downloads of fonts, versions or weights; returns the results of both ranks."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("STATSD_BN_")}
    offline = {"YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(folder)}
    program = TESTS / "frameworks" / "ultralytics_program.py"
    run_to_its_end([sys.executable, *TORCHRUN, program, folder], {**ours, **offline, **environ})
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def furthest(found, expected):
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


def weights(state):
    return {name: value for name, value in state.items() if name.endswith((".weight", ".bias"))}


def test_two_processes_train_like_one_process_and_checkpoints_have_torchs_layers(tmp_path):
    first, second = train(tmp_path)
    for found in (first, second):
        whole = found["whole"]
        torch.testing.assert_close(found["first"], whole["first"], rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(dict(found["last"]), dict(whole["last"]), rtol=LAST_TOLERANCE, atol=LAST_TOLERANCE)
    assert furthest(first["last"], first["first"]) > 1e-2  # the statistics moved
    assert furthest(first["last"], weights(first["beginning"])) > 10 * LAST_TOLERANCE
    torch.testing.assert_close(first["last"], second["last"], rtol=0, atol=0)
    assert "SynchronizedBatchNorm2d" in first["layers"]
    assert "torch.nn.modules.batchnorm.BatchNorm2d" in first["saved"]
    assert not [name for name in first["saved"] if name.startswith("client.")]


def test_without_the_callbacks_the_ranks_differ(tmp_path):
    first, second = train(tmp_path, UNSYNCHRONISED="yes")
    assert furthest(first["first"], first["whole"]["first"]) > 100 * TOLERANCE
    assert furthest(first["last"], second["last"]) > 100 * TOLERANCE
    assert furthest(first["last"], weights(first["whole"]["last"])) > 10 * LAST_TOLERANCE
