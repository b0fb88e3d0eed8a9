"""Each recipe of docs/frameworks.md with the real library: two processes train like one process on the whole batch."""

import importlib.util
import os
import sys
from dataclasses import dataclass

import pytest
import torch

from frameworks import small_training as training
from support.launched import run_to_its_end
from support.paths import TESTS

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={training.RANKS}")


@dataclass(frozen=True)
class Framework:
    needs: tuple[str, ...]  # imported packages
    launcher: tuple[str, ...] = TORCHRUN  # empty for a program that starts the processes
    tolerance: float = 1e-12  # relative and absolute, of weights and running statistics
    environ: tuple[tuple[str, str], ...] = ()  # additions to the environment
    source: str = ""  # of a package that is not on PyPI


FRAMEWORKS = {
    "detectron2": Framework(("detectron2",), launcher=(), source=" (not on PyPI; tried from source at 02b5c4e)"),
    "deepspeed": Framework(("deepspeed",), tolerance=1e-5, environ=(("DS_ACCELERATOR", "cpu"),)),  # in float32
    "mmengine": Framework(("mmengine", "mmcv")),
    "monai": Framework(("monai",)),
    "ray": Framework(("ray",), launcher=()),
    "timm": Framework(("timm",)),
    "transformers": Framework(("transformers",)),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_two_processes_train_like_one_process_on_the_whole_batch(name, tmp_path):
    framework = FRAMEWORKS[name]
    for package in framework.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}{framework.source}, see docs/frameworks.md#what-is-tested")
    program = TESTS / "frameworks" / f"{name}_program.py"
    ours = {key: value for key, value in os.environ.items() if not key.startswith("STATSD_BN_")}
    run_to_its_end([sys.executable, *framework.launcher, program, tmp_path], {**ours, **dict(framework.environ)})
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(training.RANKS))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = training.train_on_the_whole_batch()
    tolerance = framework.tolerance
    torch.testing.assert_close(first, expected, rtol=tolerance, atol=tolerance, check_dtype=tolerance < 1e-6)


def test_the_training_changes_every_compared_value():
    before = training.network().state_dict()
    for name, value in training.train_on_the_whole_batch().items():
        assert name in {"0.bias", "3.bias"} or (value - before[name]).abs().max() > 1e-2, name


def test_training_on_each_rank_alone_gives_another_result():
    """Without synchronisation the results differ by far more than the tolerance."""
    x, _ = training.samples()
    whole, alone = training.network(), training.network()
    whole(x[:6])
    alone(x[:6:2])
    assert (whole[1].running_var - alone[1].running_var).abs().max() > 1e-3
