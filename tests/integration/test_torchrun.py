"""`torchrun script.py` with nothing configured: rank 0 starts a server, the others find it, and nothing is left."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from client.transports import group_memory
from programs import compiled_ddp_program as program
from support.launched import PATIENT, PROC, Launched
from support.newer_torch import needs
from support.paths import ROOT, TESTS
from support.torchs_own_tests import names_for
from support.transports import TRANSPORTS
from support.whole_batch import assert_equal

EXAMPLES = ROOT / "examples"
PROGRAMS = TESTS / "programs" / "torchrun"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

STEPS = 40
COMPARE = 12

pytestmark = [
    pytest.mark.timeout(300),  # torchrun starts its ranks twice
    pytest.mark.skipif(not (PROC / "self/environ").exists(), reason="finds processes by /proc"),
]


@pytest.fixture(scope="module")
def whole_batch():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import digits  # noqa: PLC0415 - in examples/
        from training import snapshot, train  # noqa: PLC0415 - in examples/

        network = digits.network()
        for _ in train(network, COMPARE):
            pass
        return snapshot(network)


def digits_in(processes: int, folder: Path, *options: str, steps: int = STEPS, killed: str = "") -> Launched:
    program = [PROGRAMS / "digits_program.py", killed] if killed else [EXAMPLES / "train_digits.py"]
    trained = ["--steps", str(steps), "--keep", str(COMPARE), "--save", folder / "saved.pt", "--deadline", "30"]
    command = [*TORCHRUN, "--nproc-per-node", str(processes), *options, *program, *trained]
    return Launched(command, {}, folder / "errors")


def is_whole_batch(saved: Path, whole_batch: dict[str, torch.Tensor]) -> bool:
    found = torch.load(saved, weights_only=True)["states"][COMPARE]
    return all(torch.allclose(found[name], whole_batch[name], rtol=0, atol=1e-5) for name in whole_batch)


@pytest.mark.long
def test_the_digits_are_trained_as_on_the_whole_batch(tmp_path, whole_batch):
    with digits_in(2, tmp_path, steps=COMPARE) as run:
        assert run.end() == 0, run.errors
        assert run.leaves_nothing()
    assert is_whole_batch(tmp_path / "saved.pt", whole_batch)


@pytest.mark.long
def test_after_a_worker_was_killed_the_restarted_workers_train_as_on_the_whole_batch(tmp_path, whole_batch):
    # One restart must suffice.
    with digits_in(2, tmp_path, "--max-restarts", "1", killed="worker") as run:
        run.line("step 10 of")
        run.line("step 10 of")
        assert run.end() == 0, run.errors
        assert run.leaves_nothing()
    assert is_whole_batch(tmp_path / "saved.pt", whole_batch)


@pytest.mark.long
def test_a_server_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path, whole_batch):
    with digits_in(2, tmp_path, killed="server") as run:
        assert run.end() == 0, run.errors
        assert "was killed by SIGKILL; restarting it" in run.errors
        assert run.leaves_nothing()
    assert is_whole_batch(tmp_path / "saved.pt", whole_batch)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.skipif(bool(group_memory.unavailable_reason()), reason=group_memory.unavailable_reason())
def test_a_rank_with_brighter_images_is_named_over_the_default_transport_also_by_a_new_server(tmp_path):
    with Launched(
        (*TORCHRUN, "--nproc-per-node", "3", PROGRAMS / "skewed_program.py", "3.0"), {}, tmp_path / "errors"
    ) as run:
        assert run.line("transport") == "transport shared_memory"
        assert run.line("found") == "found skew of rank 2 in layer 1"
        assert run.end() == 0, run.errors
        (finding,) = [line for line in run.errors.splitlines() if "skew:" in line]
        assert "rank 2 (" in finding
        assert "): since step " in finding
        assert finding.endswith(" in 1, and differ in 1 later layer")


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
        assert saved[f"{wrapped}/parts"] > 2, "torch has not split the network at its buckets"
        assert_equal({name: saved[f"{wrapped}/{name}"] for name in expected}, expected, 1e-9)


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
