"""timm's networks of `BatchNormAct2d` train to the weights of the whole batch."""

import pytest

import client
from programs import subclass_programs
from programs.subclass_programs import Training
from support.whole_batch import assert_equal
from zoo.libraries import is_there

pytestmark = pytest.mark.skipif(not is_there("timm"), reason="needs timm, of the extra zoo; scripts/zoo installs it")

NETWORKS = ["test_byobnet", "mobilenetv3_small_050"]

# Small, since the loss is a plain sum: at a larger rate weights and rounding errors explode.
LR = 1e-5

# Rounding errors grow in 20 steps of a deep network; a wrong statistic shows from 1e-3 on.
TOLERANCE = 1e-6


@pytest.mark.parametrize("network", NETWORKS)
def test_in_four_replicas(network):
    training = Training(network, (2, 2, 2, 2), steps=20, lr=LR)
    assert_equal(
        subclass_programs.train_in_replicas(training), subclass_programs.train_on_the_whole_batch(training), TOLERANCE
    )


@pytest.mark.parametrize("network", NETWORKS)
def test_an_unsynchronised_network_fails_the_comparison(network, monkeypatch):
    training = Training(network, (2, 2, 2, 2), steps=20, lr=LR)
    monkeypatch.setattr(client, "convert_model", lambda model: model)
    found = subclass_programs.train_in_replicas(training)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal(found, subclass_programs.train_on_the_whole_batch(training), 100 * TOLERANCE)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.timeout(600)
def test_under_ddp_in_two_processes(members, tmp_path, network, backend):
    training = Training(network, (5, 3), backend, steps=20, lr=LR)
    expected = subclass_programs.train_on_the_whole_batch(training)
    for found in members(2, subclass_programs.train_under_ddp, str(tmp_path / "store"), training):
        assert_equal(found, expected, TOLERANCE)


@pytest.mark.timeout(900)
def test_under_ddp_compiled_by_inductor(members, tmp_path):
    """The C++ compiler builds a hundred kernels, which takes minutes the first time."""
    training = Training("test_byobnet", (5, 3), "inductor", steps=20, lr=LR)
    expected = subclass_programs.train_on_the_whole_batch(training)
    for found in members(2, subclass_programs.train_under_ddp, str(tmp_path / "store"), training, wait=800.0):
        assert_equal(found, expected, TOLERANCE)
