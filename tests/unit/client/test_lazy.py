"""Lazy layers become ordinary ones in their first forward, which is synchronised already."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import client
from client.data_parallel import any_device
from client.data_parallel.replicate import execute_replication_callbacks
from support.newer_torch import needs
from support.sentences import says


@dataclass(frozen=True)
class Kind:
    """Torch's lazy class, our lazy class, the ordinary class that each becomes, and a sample's spatial shape."""

    torchs: type[nn.Module]
    twin: type[nn.Module]
    plain: type[nn.Module]
    ours: type[nn.Module]
    positions: tuple[int, ...]

    def input(self, batch):
        return torch.randn(batch, 4, *self.positions)


EACH = pytest.mark.parametrize(
    "kind",
    [
        Kind(
            getattr(nn, f"LazyBatchNorm{dimensions}"),
            getattr(client, f"LazySynchronizedBatchNorm{dimensions}"),
            getattr(nn, f"BatchNorm{dimensions}"),
            getattr(client, f"SynchronizedBatchNorm{dimensions}"),
            positions,
        )
        for dimensions, positions in (("1d", (5,)), ("2d", (4, 3)), ("3d", (2, 2, 2)))
    ],
    ids=["1d", "2d", "3d"],
)


@EACH
def test_a_converted_lazy_layer_becomes_our_ordinary_one_with_all_attributes(kind):
    old = kind.torchs(eps=0.25)
    converted = client.convert_model(nn.ModuleDict({"stem": old}), group="local")["stem"]
    assert converted is old
    assert (type(converted), converted.cls_to_become) == (kind.twin, kind.ours)
    converted.eps_mode = "clamp"
    converted(kind.input(3))
    assert type(converted) is kind.ours
    assert (converted.layer_name, converted.group, converted.eps_mode) == ("stem", "local", "clamp")
    assert (converted.num_features, converted.eps) == (4, 0.25)
    assert vars(converted).keys() == vars(kind.plain(4)).keys() | {"layer_name", "group", "eps_mode"}


@EACH
def test_a_lazy_layer_reverted_after_its_first_forward_is_torchs_ordinary_layer(kind):
    converted = client.convert_model(nn.Sequential(kind.torchs()))
    converted(kind.input(3))
    reverted = client.revert_model(converted)[0]
    assert type(reverted) is kind.plain
    assert vars(reverted).keys() == vars(kind.plain(4)).keys()


@EACH
@pytest.mark.parametrize("masked", [False, True])
def test_the_first_forward_of_a_lazy_layer_is_synchronised(kind, masked):
    """Torch looks up `forward` before it runs the hook that changes the class, so our lazy class must override it."""
    replicas = [client.convert_model(kind.torchs()) for _ in range(2)]
    execute_replication_callbacks(replicas)
    barrier = vars(replicas[0])["_barrier"]
    x = kind.input(6)
    shards = [(shard, torch.ones(3, *kind.positions, dtype=torch.bool)) if masked else (shard,) for shard in x.split(3)]
    devices = [torch.device("cpu")] * 2
    outputs = any_device.parallel_apply(replicas, shards, [{}, {}], devices, barrier)
    torch.testing.assert_close(torch.cat(outputs), kind.plain(4)(x))


@EACH
def test_a_lazy_layer_made_by_hand_takes_torchs_arguments_and_ours(kind):
    layer = kind.twin(0.25, None, affine=True, track_running_stats=False, dtype=torch.float64, eps_mode="clamp")
    assert isinstance(layer, kind.torchs)
    layer(kind.input(3).double())
    assert type(layer) is kind.ours
    assert (layer.eps, layer.momentum, layer.eps_mode, layer.running_mean) == (0.25, None, "clamp", None)
    assert layer.weight.dtype == torch.float64
    assert kind.twin().layer_name != kind.twin().layer_name


@needs("bias=False")
@EACH
def test_a_lazy_layer_may_have_no_bias(kind):
    layer = kind.twin(bias=False)
    layer(kind.input(3))
    assert layer.bias is None
    assert layer.weight is not None


@pytest.mark.parametrize("when", ["before its first forward", "after its first forward", "after torch's first forward"])
def test_a_lazy_layer_loads_the_state_of_an_ordinary_layer(when):
    plain, layer = nn.BatchNorm1d(3), nn.LazyBatchNorm1d()
    x = torch.randn(5, 3)
    plain(x)
    if when == "after its first forward":
        layer = client.convert_model(layer)
        layer(x)
    layer.load_state_dict(plain.state_dict())
    if when == "after torch's first forward":
        layer.eval()(x)
    layer = client.convert_model(layer).train()
    assert torch.equal(layer(x), plain(x))
    assert layer.num_features == 3
    with pytest.raises(ValueError, match="expected 3 channels, got 4"):
        layer(torch.randn(5, 4))


def test_a_lazy_layer_loaded_before_its_first_forward_refuses_other_channels():
    layer = client.LazySynchronizedBatchNorm1d()
    layer.load_state_dict(nn.BatchNorm1d(3).state_dict())
    with pytest.raises(ValueError, check=says("expected 3 channels, got 4")):
        layer(torch.randn(5, 4))


def test_a_lazy_layer_without_any_tensor_learns_its_channels_too():
    layer = client.LazySynchronizedBatchNorm1d(affine=False, track_running_stats=False)
    x = torch.randn(5, 3)
    assert torch.equal(layer(x), nn.BatchNorm1d(3, affine=False, track_running_stats=False)(x))
    assert layer.num_features == 3
