"""Conversion: the layers that `convert_model` synchronises, what it keeps and reports, and the way back."""

import copy
import warnings

import pytest
import torch
from torch import nn

import client
from support.subclasses import Activated, Functional


class HomeMade(nn.BatchNorm2d):
    """Computes its statistics itself, so there is no call of `batch_norm` to synchronise."""

    def forward(self, x):
        centred = x - x.mean((0, 2, 3), keepdim=True)
        return centred / (centred.square().mean((0, 2, 3), keepdim=True) + self.eps).sqrt()


class OwnCall(nn.BatchNorm2d):
    """A `__call__` that may bypass `forward`."""

    def __call__(self, x):
        return x - x.mean((0, 2, 3), keepdim=True)


KINDS = [
    (nn.BatchNorm1d, (3,), client.SynchronizedBatchNorm1d),
    (nn.BatchNorm2d, (3,), client.SynchronizedBatchNorm2d),
    (nn.BatchNorm3d, (3,), client.SynchronizedBatchNorm3d),
    (nn.LazyBatchNorm1d, (), client.LazySynchronizedBatchNorm1d),
    (nn.LazyBatchNorm2d, (), client.LazySynchronizedBatchNorm2d),
    (nn.LazyBatchNorm3d, (), client.LazySynchronizedBatchNorm3d),
    (nn.SyncBatchNorm, (3,), client.SynchronizedBatchNorm),
]


@pytest.mark.parametrize(("torchs", "channels", "synchronised"), KINDS, ids=[kind.__name__ for kind, *_ in KINDS])
def test_each_batch_norm_of_torchs_has_a_synchronised_class_and_comes_back_as_the_same_object(
    torchs, channels, synchronised
):
    model = nn.Sequential(nn.Sequential(torchs(*channels)))
    inner, state = model[0][0], list(model.state_dict())
    assert client.convert_model(model) is model
    assert model[0][0] is inner
    assert type(inner) is synchronised
    assert list(model.state_dict()) == state
    assert client.revert_model(model) is model
    assert type(inner) is torchs


def trained(model, x):
    """Output, gradients and buffers of one training step."""
    x = x.clone().requires_grad_()
    output = model(x)
    (output * torch.arange(float(output.numel()), dtype=x.dtype).view_as(output).sin()).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [output.detach(), x.grad, *gradients, *model.buffers()]


def split(model, replicas=2):
    return client.DataParallelWithCallback(model, ["cpu"] * replicas)


@pytest.mark.parametrize("kind", [Activated, Functional])
def test_a_subclass_keeps_its_forward_and_is_synchronised(kind):
    torch.manual_seed(0)
    x, plain = torch.randn(5, 3, 4, 4, dtype=torch.float64), kind(3).double()
    layer = client.convert_model(nn.Sequential(copy.deepcopy(plain)))[0]
    assert isinstance(layer, kind)
    assert isinstance(layer, client.SynchronizedBatchNorm)
    assert type(layer) is client.synchronized_class(kind)
    torch.testing.assert_close(trained(split(layer), x), trained(plain, x), rtol=1e-10, atol=1e-10)
    assert type(client.revert_model(layer)) is kind


def test_what_an_optimizer_a_hook_or_a_second_place_knows_stays():
    shared = nn.BatchNorm2d(3).eval()
    model = nn.Sequential(shared, nn.Sequential(shared), nn.BatchNorm2d(3))
    model[2].weight.requires_grad_(requires_grad=False)
    parameters, called = list(model.parameters()), []
    shared.register_forward_hook(lambda *_: called.append("hook"))
    client.convert_model(model)
    assert all(before is now for before, now in zip(parameters, model.parameters(), strict=True))
    assert model[0] is model[1][0] is shared
    assert not shared.training
    assert not model[2].weight.requires_grad
    model(torch.randn(2, 3, 2, 2))
    assert called == ["hook"] * 2


def test_a_data_parallel_becomes_one_with_callbacks_and_layers_are_named_by_their_place():
    converted = client.convert_model(nn.DataParallel(nn.Sequential(nn.Identity(), nn.BatchNorm1d(2))))
    assert type(converted) is client.DataParallelWithCallback
    assert converted.module[1].layer_name == "1"
    reverted = client.revert_model(converted)
    assert type(reverted) is nn.DataParallel
    assert type(reverted.module[1]) is nn.BatchNorm1d


def test_the_state_is_that_of_torchs_layer_and_loads_either_way():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    plain(torch.randn(4, 2, 3, 3))
    ours = client.convert_model(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)))
    ours.load_state_dict(plain.state_dict())
    assert list(ours[1].state_dict()) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    back = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    back.load_state_dict(ours.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
        assert torch.equal(back.state_dict()[name], tensor), name


def test_the_report_names_what_is_synchronised_and_what_is_not_and_why(caplog):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Functional(3)), OwnCall(3), HomeMade(3))
    with pytest.warns(UserWarning, match=r"convert_model left 1 layer unsynchronised: '2' \(OwnCall: "):
        client.convert_model(model)
    # Only a step in training shows that a forward does without batch_norm.
    model(torch.rand(2, 3, 2, 2))
    assert "layer '3' not synchronised: the forward of HomeMade did not call batch_norm" in caplog.text
    report = client.conversion_report(model)
    assert isinstance(report, client.ConversionReport)
    assert report.synchronised == {"0": "SynchronizedBatchNorm2d", "1.0": "Functional"}
    (one, (kind, _)), (other, (other_kind, reason)) = report.left.items()
    assert (one, kind, other, other_kind) == ("2", "OwnCall", "3", "HomeMade")
    assert "batch_norm" in reason
    assert "left 2 layers unsynchronised" in str(report)


@pytest.fixture
def registered():
    """A class with a registered conversion; only this test uses it, so it may stay registered."""

    class Registered(HomeMade):
        pass

    client.register_conversion(Registered, lambda layer: client.SynchronizedBatchNorm2d(layer.num_features, eps=0.5))
    return Registered


def test_a_registered_conversion_determines_the_result_for_a_class(registered):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = client.convert_model(nn.Sequential(registered(7)))
    assert type(model[0]) is client.SynchronizedBatchNorm2d
    assert (model[0].num_features, model[0].eps) == (7, 0.5)
    with pytest.raises(TypeError, match=r"original: expected a subclass of nn\.Module"):
        client.register_conversion(registered(7), lambda layer: layer)


def test_a_lazy_layer_learns_its_channels_from_its_first_input():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 2, 2)
    model = client.convert_model(nn.Sequential(nn.LazyBatchNorm2d()))
    output = model(x)
    assert type(model[0]) is client.SynchronizedBatchNorm2d
    torch.testing.assert_close(output, nn.BatchNorm2d(3)(x))
    torch.testing.assert_close(split(model)(x), output)


def test_a_layer_of_ones_own_is_derived_from_ours():
    class Own(client.SynchronizedBatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    torch.manual_seed(0)
    x, layer = torch.randn(4, 3, 2, 2), Own(3)
    assert client.convert_model(nn.Sequential(layer))[0] is layer
    torch.testing.assert_close(split(layer)(x), nn.BatchNorm2d(3)(x).relu())


@pytest.fixture
def eps_mode():
    """Sets the mode of all layers without their own; the default comes back after the test."""
    yield client.set_sbn_eps_mode
    client.set_sbn_eps_mode("plus")


def normalised(x, denominator):
    return (x - x.mean(0)) / denominator(x.var(0, correction=0))


def test_clamp_divides_by_the_larger_of_variance_and_eps_and_plus_by_their_sum(eps_mode):
    torch.manual_seed(0)
    eps, x = 0.5, torch.randn(6, 2, dtype=torch.float64) * torch.tensor([0.1, 3.0], dtype=torch.float64)
    expected = {
        "plus": normalised(x, lambda variance: (variance + eps).sqrt()),
        "clamp": normalised(x, lambda variance: variance.clamp(min=eps).sqrt()),
    }
    made_before = client.SynchronizedBatchNorm1d(2, eps=eps, dtype=torch.float64)
    given_its_own = client.SynchronizedBatchNorm1d(2, eps=eps, dtype=torch.float64, eps_mode="plus")
    for mode in ("clamp", "plus"):
        eps_mode(mode)
        torch.testing.assert_close(split(made_before)(x), expected[mode])
        torch.testing.assert_close(split(given_its_own)(x), expected["plus"])
        own = client.SynchronizedBatchNorm1d(2, eps=eps, dtype=torch.float64, eps_mode=mode)
        torch.testing.assert_close(split(own)(x), expected[mode])
    with pytest.raises(ValueError, match="'plus', 'clamp'"):
        client.set_sbn_eps_mode("minus")


def test_layers_made_while_torch_is_patched_are_synchronised():
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    with client.patch_sync_batchnorm():
        model = nn.Sequential(nn.BatchNorm1d(2))
    torch.testing.assert_close(split(model)(x), nn.BatchNorm1d(2)(x))
    assert client.conversion_report(model).synchronised == {"0": "SynchronizedBatchNorm1d"}


def test_torchs_own_name_of_the_conversion_does_the_same():
    model = client.SynchronizedBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    assert type(model[0]) is client.SynchronizedBatchNorm2d


@pytest.mark.parametrize(("torchs", "channels", "synchronised"), KINDS, ids=[kind.__name__ for kind, *_ in KINDS])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_a_layer_that_is_made_has_the_state_of_torchs(torchs, channels, synchronised, options):
    plain, ours = torchs(*channels, **options), synchronised(*channels, **options)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
