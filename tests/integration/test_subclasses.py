"""Subclasses of torch's batch norm between processes: they train as on the whole batch, eager and compiled."""

import sys

import numpy as np
import pytest

from programs import subclass_programs
from programs.subclass_programs import Training
from support.launched import Launched
from support.paths import ROOT
from support.transports import HOST_TRANSPORTS
from support.whole_batch import assert_equal

BACKENDS = pytest.mark.parametrize("backend", ["", "aot_eager"])
THREES = [
    pytest.param(three, marks=pytest.mark.long if place else [])
    for place, three in enumerate(subclass_programs.IN_THREES)
]

COMPILE_SECONDS = 300.0


def check_members(members, training, tolerance=1e-9, program=subclass_programs.train, *arguments):
    expected = subclass_programs.train_on_the_whole_batch(training)
    # inductor's compilers take minutes on a busy machine
    patience = {"wait": COMPILE_SECONDS} if training.backend == "inductor" else {}
    for found in members(2, program, *arguments, training, **patience):
        assert_equal(found, expected, tolerance)


@BACKENDS
def test_members_train_as_on_the_whole_batch(members, backend):
    check_members(members, Training(backend=backend))


@pytest.mark.parametrize("network", THREES)
def test_compiled_members_with_other_kinds_train_as_on_the_whole_batch(members, network):
    check_members(members, Training(network, backend="aot_eager"))


@pytest.mark.parametrize(
    ("kinds", "backend"), [("all kinds", ""), pytest.param("three kinds", "aot_eager", marks=pytest.mark.long)]
)
def test_after_20_steps_under_ddp_the_weights_are_those_of_the_whole_batch(members, tmp_path, kinds, backend):
    training = Training(kinds, backend=backend, steps=20, lr=1e-4)
    check_members(members, training, 1e-8, subclass_programs.train_under_ddp, str(tmp_path / "store"))


@pytest.mark.long
def test_torchrun_trains_as_on_the_whole_batch_with_nothing_configured(tmp_path):
    script = ROOT / "tests" / "programs" / "subclass_programs.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, tmp_path / "saved.npz"]
    with Launched(command, {}, tmp_path / "errors") as run:
        assert run.end() == 0, run.errors
        assert "not synchronised" not in run.errors
    expected = subclass_programs.train_on_the_whole_batch(Training("all kinds", steps=20, lr=1e-4))
    assert_equal(dict(np.load(tmp_path / "saved.npz")), expected, 1e-8)


# Of the cases compiled by aot_eager only the first is quick; its others, and the one with inductor, are long tests.
EMPTY_RANKS = [
    pytest.param(sizes, network, backend, marks=pytest.mark.long if is_other else [])
    for backend in ("", "aot_eager")
    for sizes, network, is_other in (
        ((4, 0), "empty", False),
        ((0, 3), "three kinds", backend),
        ((0, 3), "empty", backend),
        ((4, 0), "three kinds", backend),
    )
]
EMPTY_RANKS += [pytest.param((4, 0), "three kinds", "inductor", marks=[pytest.mark.long, pytest.mark.timeout(400)])]


@pytest.mark.parametrize(("sizes", "network", "backend"), EMPTY_RANKS)
def test_a_member_with_an_empty_batch_takes_part(members, sizes, network, backend):
    check_members(members, Training(network, sizes, backend))


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_a_rank_that_skips_a_layer_without_rows_gets_the_remedy(over, transport):
    for text in over(transport, 2, subclass_programs.pass_a_layer_without_rows_on_rank_1):
        assert text.startswith("RoundMismatch: ")
        assert "every rank, equally often; a rank without rows passes an empty (0, C) tensor." in text
