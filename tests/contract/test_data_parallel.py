"""Replicas of one process, under `DataParallelWithCallback`, compute what `nn.BatchNorm*d` does on the whole batch."""

import copy

import pytest
import torch
from torch import nn

import client
from support.comparison import assert_close

KINDS = {
    "1d of (N, C)": (nn.BatchNorm1d, ()),
    "1d of (N, C, L)": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (4, 3)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
CHANNELS = 4
DTYPE = torch.float64


def layer_of(kind, **options):
    """A layer of torch in which no tensor has its default values."""
    generator = torch.Generator().manual_seed(3)
    layer = KINDS[kind][0](CHANNELS, dtype=DTYPE, **options)
    for tensor in (*layer.parameters(), layer.running_mean, layer.running_var):
        tensor.data.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
    return layer


def batch_of(kind, size):
    """An input with different mean and scale in each channel, and factors of the loss."""
    generator = torch.Generator().manual_seed(size)
    shape = (size, CHANNELS, *KINDS[kind][1])
    x, factors = (torch.randn(shape, generator=generator, dtype=DTYPE) for _ in range(2))
    along = torch.arange(1.0, CHANNELS + 1, dtype=DTYPE).view(1, CHANNELS, *[1] * len(KINDS[kind][1]))
    return x * along + along, factors


def trained(forward, layer, x, factors):
    """All that a training step leaves: output, gradients, and the layer's buffers."""
    x = x.clone().requires_grad_()
    output = forward(x)
    (output * factors).sum().backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "gradient of x": x.grad, **gradients, **dict(layer.named_buffers())}


def assert_is_whole_batch(plain, replicated, synchronised, x, factors, sizes):
    """Asserts that ours on slices of `sizes` and torch's layer on the whole batch compute the same step."""
    seen = []
    hook = synchronised.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    found = trained(replicated, synchronised, x, factors)
    hook.remove()
    assert sorted(seen) == sorted(sizes)
    assert_close(found, trained(plain, plain, x, factors))


def both(kind, **options):
    """Torch's layer, and a synchronised copy of it."""
    plain = layer_of(kind, **options)
    return plain, client.convert_model(copy.deepcopy(plain))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 2, 2, 1), (2, 2, 1)], ids=str)
def test_replicas_compute_what_torch_does_on_the_whole_batch_also_where_it_splits_unequally(kind, sizes):
    plain, synchronised = both(kind)
    model = client.DataParallelWithCallback(synchronised, ["cpu"] * 4)
    assert_is_whole_batch(plain, model, synchronised, *batch_of(kind, sum(sizes)), sizes)


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"momentum": None}, {"momentum": 0.3, "eps": 0.1}],
    ids=["not affine", "cumulative average", "momentum and eps"],
)
def test_options_of_torchs_layer_mean_the_same(options):
    plain, synchronised = both("2d", **options)
    model = client.DataParallelWithCallback(synchronised, ["cpu"] * 2)
    assert_is_whole_batch(plain, model, synchronised, *batch_of("2d", 6), (3, 3))


class Sliced(client.DataParallelWithCallback):
    """Gives each replica a slice of a length that the test chooses, 0 too."""

    sizes = ()

    def scatter(self, inputs, kwargs, device_ids):
        assert len(self.sizes) == len(device_ids)
        return [(part,) for part in inputs[0].split(self.sizes)], [kwargs or {}] * len(device_ids)


@pytest.mark.parametrize("sizes", [(5, 1), (1, 1, 4), (6, 0), (0, 3, 0, 3)], ids=str)
def test_unequal_and_empty_slices_count_for_what_they_have(sizes):
    plain, synchronised = both("2d")
    model = Sliced(synchronised, ["cpu"] * len(sizes))
    model.sizes = sizes
    assert_is_whole_batch(plain, model, synchronised, *batch_of("2d", 6), sizes)


def test_one_sample_on_each_replica_is_a_batch():
    plain, synchronised = both("1d of (N, C)")
    model = client.DataParallelWithCallback(synchronised, ["cpu"] * 2)
    assert_is_whole_batch(plain, model, synchronised, *batch_of("1d of (N, C)", 2), (1, 1))


def test_one_value_in_the_whole_batch_is_refused_as_torch_does():
    model = client.DataParallelWithCallback(client.SynchronizedBatchNorm1d(CHANNELS), ["cpu"] * 2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.ones(1, CHANNELS))


def test_in_eval_replicas_use_the_running_statistics():
    plain, synchronised = both("2d")
    model = client.DataParallelWithCallback(synchronised, ["cpu"] * 3).eval()
    x, _ = batch_of("2d", 5)
    torch.testing.assert_close(model(x), plain.eval()(x), rtol=1e-12, atol=1e-12)


def test_several_layers_train_for_several_steps_as_one():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3), nn.Flatten()
    ).double()
    model = client.DataParallelWithCallback(client.convert_model(copy.deepcopy(plain)), ["cpu"] * 3)
    x, factors = torch.randn(7, 2, 6, 6, dtype=DTYPE), torch.randn(7, 27, dtype=DTYPE)
    states = []
    for module in (plain, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            (module(x) * factors).sum().backward()
            optimizer.step()
        states.append(getattr(module, "module", module).state_dict())
    assert_close(states[1], states[0])
