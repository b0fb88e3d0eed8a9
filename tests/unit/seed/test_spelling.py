"""Scripts written for Synchronized-BatchNorm-PyTorch, with `client` for `sync_batchnorm` in their imports."""

import pickle

import pytest
import torch
from torch import nn

import client
from client import SynchronizedBatchNorm1d, convert_model, set_sbn_eps_mode
from client import comm as comm_module
from support.subclasses import Activated

EPS = 0.5  # above the variances, so the modes differ


@pytest.fixture(autouse=True)
def mode_of_before(monkeypatch):
    monkeypatch.setattr(client.SynchronizedBatchNorm, "eps_mode", "plus")


def normalised(x, mode):
    variance, mean = torch.var_mean(x, 0, correction=0)
    return (x - mean) / (variance.clamp(min=EPS) if mode == "clamp" else variance + EPS).sqrt()


def small_values():
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1


def layer(**options):
    return SynchronizedBatchNorm1d(3, EPS, dtype=torch.float64, **options)


def test_converted_layers_and_subclasses_follow_the_global_eps_mode():
    set_sbn_eps_mode("clamp")
    plain = nn.Sequential(nn.BatchNorm1d(3, EPS), Activated(3), nn.LazyBatchNorm1d())
    assert {one.eps_mode for one in convert_model(plain)} == {"clamp"}
    assert client.LazySynchronizedBatchNorm1d().eps_mode == "clamp"


def test_a_layer_with_an_explicit_eps_mode_keeps_it():
    set_sbn_eps_mode("clamp")
    assert layer(eps_mode="plus").eps_mode == "plus"
    assert pickle.loads(pickle.dumps(layer(eps_mode="plus"))).eps_mode == "plus"  # noqa: S301 - our own


def test_a_pickle_does_not_keep_the_global_mode():
    set_sbn_eps_mode("clamp")
    pickled = pickle.dumps(layer())
    set_sbn_eps_mode("plus")
    assert pickle.loads(pickled).eps_mode == "plus"  # noqa: S301 - our own


def test_alone_and_in_eval_a_layer_is_torchs():
    set_sbn_eps_mode("clamp")
    for is_training in (True, False):
        plain = nn.BatchNorm1d(3, EPS, dtype=torch.float64).train(is_training)
        assert torch.equal(layer().train(is_training)(small_values()), plain(small_values()))


def test_a_compiled_layer_follows_a_later_mode(monkeypatch):
    """The compiler treats the mode as a constant, so a change must compile anew."""
    monkeypatch.setattr(SynchronizedBatchNorm1d, "_must_synchronise", lambda *_: True)
    torch.compiler.reset()
    compiled = torch.compile(layer(), fullgraph=True, backend="eager")
    for mode in ("plus", "clamp", "plus"):
        set_sbn_eps_mode(mode)
        torch.testing.assert_close(compiled(small_values()), normalised(small_values(), mode))


def test_client_comm_has_the_names_of_the_original_module():
    assert set(comm_module.__all__) == {"FutureResult", "SlavePipe", "SyncMaster"}


def test_smart_ddp_has_the_name_that_yolov5_uses():
    assert client.smart_DDP is client.smart_ddp
