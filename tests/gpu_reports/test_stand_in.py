"""The GPU report with the CPU standing in: every step runs, and finds the fault that is planted in it."""

import json
import subprocess

import pytest
from gpu_report.steps import PLANS

from client.transports import group_memory
from gpu_reports.test_frame import on_path
from support.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(900)]

# Step, planted fault, and the check that finds it.
PLANTS = [
    ("versions", "plants:wrong_product", "the device multiplies matrices"),
    ("key_figures", "plants:value_read", "ours, on the device: the host does not wait"),
    ("key_figures", "plants:wrong_sum", "ours, on the device computes what BatchNorm2d does"),
    ("key_figures", "plants:rows_over_host", "ours, on the device: rows stay there"),
    ("tests", "plants:wrong_sum", "test_replicas.py::"),
    ("resnet50", "plants:moved_twice", "ours, on the device: the first running statistics are those of BatchNorm2d"),
    ("correctness", "plants:narrow_sums", "world of one: 4-D: results are within the bounds"),
    ("correctness", "plants:rows_over_host", "world of one: mask: all rows stay on the device"),
    ("graphs", "plants:value_read", "replicas: a training step waits for nothing"),
    ("graphs", "plants:wide_output", "world of one: autocast to torch.float16"),
    ("graphs", "plants:counted_on_host", "world of one: replays of a graph"),
    ("compile", "plants:compiled_without_round", "reduce-overhead: outputs, gradients"),
    ("ranks", "plants:own_order", "gloo, 4 ranks: all have the same bits"),
    ("ranks", "plants:same_digests", "ranks in different layers: all raise RoundMismatch"),
    ("ranks", "plants:over_server", "shared memory: rows reach the others in memory"),
    ("nccl", "plants:missing_wait", "without set_device: losses equal the whole batch's"),
]


def report(folder, *arguments):
    # The limit is longer than a report takes on a busy machine, and shorter than pytest's timeout.
    command = [ROOT / "scripts" / "gpu-report", "--stand-in", "--seconds=840", "--output", folder, *arguments]
    done = subprocess.run(command, env=on_path(), capture_output=True, text=True, check=False)
    assert (folder / "results.json").exists(), done.stderr
    return done, json.loads((folder / "results.json").read_text())["steps"], (folder / "report.md").read_text()


def test_every_step_runs(tmp_path):
    done, found, text = report(tmp_path)
    assert {name: result["outcome"] for name, result in found.items()} == {plan.name: "passed" for plan in PLANS}
    assert done.returncode == 0, done.stderr
    assert all(result["stand_in"] for result in found.values())
    assert all(f"## {plan.name}, stand-in" in text for plan in PLANS)
    files = list(tmp_path.iterdir())
    assert len(files) <= 8
    assert max(path.stat().st_size for path in files) <= 16 << 20


@pytest.mark.parametrize(("step", "plant", "about"), PLANTS, ids=[f"{step}-{plant}" for step, plant, _ in PLANTS])
def test_a_planted_fault_is_a_failed_check(tmp_path, step, plant, about):
    if plant == "plants:over_server" and (reason := group_memory.unavailable_reason()):
        pytest.skip(reason)
    done, found, text = report(tmp_path, step, f"--plant=gpu_reports.{plant}")
    result = found[step]
    failed = [check["name"] for check in result["checks"] if not check["passed"]]
    assert [name for name in failed if about in name], failed
    assert result["outcome"] == f"{len(failed)} of {len(result['checks'])} checks failed"
    assert done.returncode == int(not result["may_fail"])
    assert all(f"Failed: **{name}**" in text for name in failed)
