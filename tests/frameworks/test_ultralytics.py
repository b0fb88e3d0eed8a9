"""Ultralytics' own trainer with the recipe's callbacks, in two processes on the CPU.

Its loss divides by what each rank's labels weigh, so its gradients are none of the whole batch, and weights cannot be
compared. The first step's running statistics can, and those of both ranks to the end.
"""

import importlib.util
import os
import sys

import pytest
import torch

from support.groups_of_processes import run_to_its_end
from support.paths import TESTS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("ultralytics") is None,
        reason="needs ultralytics, see docs/frameworks.md#what-is-tested",
    ),
]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

# Of float32, for all layers; without synchronisation some statistics are off by more than a hundredth.
TOLERANCE = 1e-4


def train(folder, **environ):
    """What both ranks found. Offline, so that it asks nobody for fonts, versions or weights."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("STATSD_BN_")}
    offline = {"YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(folder)}
    program = TESTS / "frameworks" / "ultralytics_program.py"
    run_to_its_end([sys.executable, *TORCHRUN, program, folder], {**ours, **offline, **environ})
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def furthest(found, expected):
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


def test_the_layers_are_synchronised_and_checkpoints_are_plain(tmp_path):
    first, second = train(tmp_path)
    for found in (first, second):
        torch.testing.assert_close(found["first"], found["whole"], rtol=TOLERANCE, atol=TOLERANCE)
    assert furthest(first["last"], first["first"]) > 1e-2  # it has gone on
    torch.testing.assert_close(first["last"], second["last"], rtol=0, atol=0)
    assert "SynchronizedBatchNorm2d" in first["layers"]
    assert "torch.nn.modules.batchnorm.BatchNorm2d" in first["saved"]
    assert not [name for name in first["saved"] if name.startswith("client.")]


def test_without_the_callbacks_the_ranks_differ(tmp_path):
    first, second = train(tmp_path, UNSYNCHRONISED="yes")
    assert furthest(first["first"], first["whole"]) > 100 * TOLERANCE
    assert furthest(first["last"], second["last"]) > 100 * TOLERANCE
