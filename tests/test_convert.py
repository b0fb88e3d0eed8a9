"""convert_model keeps everything, revert_model brings it back, patch_sync_batchnorm cleans up after itself."""

import pytest
import torch
from torch import nn

import client
from client import DataParallelWithCallback
from whole_batch import SYNCHRONISED


def model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5)),
        nn.ModuleDict({"volume": nn.BatchNorm3d(2)}),
    )


def kinds(module):
    return [type(layer) for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def test_every_batch_norm_is_replaced_and_named_by_its_place():
    converted = client.convert_model(model())
    assert kinds(converted) == [SYNCHRONISED[kind] for kind in (nn.BatchNorm2d, nn.BatchNorm1d, nn.BatchNorm3d)]
    names = [layer.layer_name for layer in converted.modules() if hasattr(layer, "layer_name")]
    assert names == ["1", "2.2", "3.volume"]


def test_parameters_buffers_modes_and_hooks_are_the_same_objects():
    old = nn.BatchNorm2d(4, eps=1e-2, momentum=None)
    old.weight.requires_grad_(requires_grad=False)
    old.eval()
    calls = []
    old.register_forward_hook(lambda *_: calls.append("hook"))
    holder = nn.Sequential(old)
    new = client.convert_model(holder)[0]
    assert new is not old
    assert new.weight is old.weight
    assert new.running_mean is old.running_mean
    assert (new.eps, new.momentum, new.training, new.weight.requires_grad) == (1e-2, None, False, False)
    new(torch.ones(2, 4, 3, 3))
    assert calls == ["hook"]


def test_a_shared_layer_stays_shared_and_has_the_name_of_its_first_place():
    shared = nn.BatchNorm2d(4)
    converted = client.convert_model(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert converted["a"] is converted["b"][0]
    assert converted["a"].layer_name == "a"


def test_a_batch_norm_by_itself_is_converted():
    assert type(client.convert_model(nn.BatchNorm1d(3))) is client.SynchronizedBatchNorm1d


def test_other_layers_and_subclasses_are_left_as_they_are():
    class Special(nn.BatchNorm2d):
        pass

    untouched = nn.Sequential(nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), Special(4))
    before = list(untouched)
    assert list(client.convert_model(untouched)) == before


def test_data_parallel_is_wrapped_again():
    inner = model()
    converted = client.convert_model(nn.DataParallel(inner))
    assert type(converted) is DataParallelWithCallback
    assert kinds(converted.module) == kinds(client.convert_model(model()))
    assert converted.module[1].layer_name == "1"


def test_names_do_not_depend_on_a_wrapper():
    """A member under DataParallel and a member without must speak of the same layer."""
    wrapped = DataParallelWithCallback(model(), ["cpu"] * 2)
    converted = client.convert_model(wrapped)
    assert converted is wrapped
    assert converted.module[1].layer_name == "1"


def test_converting_twice_changes_nothing():
    once = client.convert_model(model())
    layers = list(once.modules())
    assert list(client.convert_model(once).modules()) == layers


def test_revert_is_the_inverse():
    original = model()
    reverted = client.revert_model(client.convert_model(original))
    assert kinds(reverted) == kinds(model())
    assert [vars(layer).keys() for layer in reverted.modules()] == [vars(layer).keys() for layer in model().modules()]


def test_patch_makes_synchronised_layers_and_restores_torchs():
    before = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    with client.patch_sync_batchnorm():
        assert kinds(model()) == [SYNCHRONISED[kind] for kind in (before[1], before[0], before[2])]
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == before
    with pytest.raises(ZeroDivisionError), client.patch_sync_batchnorm():
        raise ZeroDivisionError
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == before
