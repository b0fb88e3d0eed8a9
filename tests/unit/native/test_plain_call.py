"""The plain call on a CPU, also with tensors whose memory does not hold their values."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import client
from client.nn import call, running_stats
from client.ops.statistics import ChannelMoments

SHAPE = (8, 4, 3, 3)


@pytest.fixture(autouse=True)
def always_synchronised(monkeypatch):
    """Makes a layer synchronise although it is alone."""
    monkeypatch.setattr(client.SynchronizedBatchNorm2d, "_must_synchronise", lambda *_: True)


def layers():
    ours, torchs = client.SynchronizedBatchNorm2d(4), nn.BatchNorm2d(4)
    with torch.no_grad():
        ours.weight.copy_(torch.arange(1.0, 5))
    torchs.load_state_dict(ours.state_dict())
    return ours, torchs


def random(seed=0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def gradients(layer, x, grad, change=lambda _: None, given=lambda x: x):
    x = x.clone().requires_grad_()
    output = layer(given(x))
    change(layer)
    output.backward(grad)
    return [output.detach().as_subclass(torch.Tensor), x.grad, layer.weight.grad, layer.bias.grad]


def assert_close(found, expected):
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["input", "gradient", "weight"])
def test_a_negated_tensor_counts_with_its_sign(name):
    ours, torchs = layers()
    x, grad = random(), random(1)
    x, grad = torch._neg_view(x) if name == "input" else x, torch._neg_view(grad) if name == "gradient" else grad
    if name == "weight":
        ours.weight.data = torch._neg_view(torch.arange(1.0, 5))
        torchs.weight.data = -torch.arange(1.0, 5)
    plain = x.resolve_neg(), grad.resolve_neg()
    found = ours(x.detach().requires_grad_())
    assert_close([found.detach()], [torchs(plain[0]).detach()])
    assert_close(gradients(ours, *plain)[1:2], gradients(torchs, *plain)[1:2])
    x = plain[0].clone().requires_grad_()
    ours(x).backward(grad)
    expected = plain[0].clone().requires_grad_()
    torchs(expected).backward(plain[1])
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-4, atol=1e-4)


def test_results_of_functional_collectives_are_waited_for():
    ours, torchs = layers()
    found = gradients(ours, random(), AsyncCollectiveTensor(random(1)))
    assert_close(found, gradients(torchs, random(), random(1)))
    assert_close([ours(AsyncCollectiveTensor(random())).detach() + 0], [torchs(random()).detach()])


@pytest.mark.parametrize("is_layer_fake", [False, True])
def test_fake_tensors_raise(is_layer_fake):
    ours, x = layers()[0], random()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((RuntimeError, AssertionError, TypeError)):
        (client.SynchronizedBatchNorm2d(4) if is_layer_fake else ours)(torch.randn(SHAPE) if is_layer_fake else x)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_without_values_raises(name):
    ours, _ = layers()
    setattr(ours, name, nn.Parameter(torch.ones(4, device="meta")))
    with pytest.raises(RuntimeError, match="device of the input"):
        ours(random())
    ours, _ = layers()
    getattr(ours, name).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="values in memory"):
        ours(random())


def test_hooks_may_return_tensors_of_another_layout():
    ours, torchs = layers()
    with saved_tensors_hooks(lambda x: torch.stack((x, x), -1), lambda x: x[..., 0]):
        found = gradients(ours, random(), random(1))
    assert_close(found, gradients(torchs, random(), random(1)))


def test_a_weight_may_be_given_another_memory_between_the_passes():
    def change(layer):
        layer.weight.data = torch.arange(1.0, 9)[::2]

    ours, torchs = layers()
    found, expected = (gradients(layer, random(), random(1), change) for layer in (ours, torchs))
    assert_close(found[1:2], expected[1:2])


def test_a_weight_of_another_length_in_the_backward_pass_raises():
    def change(layer):
        layer.weight.data = torch.ones(2)

    with pytest.raises((RuntimeError, ValueError)):
        gradients(layers()[0], random(), random(1), change)


def test_a_selective_checkpoint_reuses_the_results_of_the_first_run():
    def policy(_context, operator, *_given, **_named):
        is_saved = operator is torch.ops.aten.convolution.default
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    ours, torchs = layers()
    convolution = nn.Conv2d(4, 4, 1)
    found = []
    for layer in (ours, torchs):
        x = random().requires_grad_()
        network = nn.Sequential(convolution, layer, nn.ReLU())
        checkpoint.checkpoint(network, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
        found.append([x.grad, layer.weight.grad])
    assert_close(*found)
    assert ours.num_batches_tracked == 1


def test_an_inference_tensor_updates_no_running_statistics():
    ours, _ = layers()
    with torch.inference_mode():
        x = random()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        ours(x)
    assert ours.running_mean.tolist() == [0] * 4


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(4, requires_grad=True), torch._neg_view(torch.zeros(4)), torch.zeros(1).expand(4)],
    ids=["learnt", "negated", "expanded"],
)
def test_buffers_that_the_core_cannot_update_are_left_to_torch(buffer):
    x, layer = random(), layers()[0]
    layer.running_mean = buffer
    assert running_stats.in_place_buffers(layer, x, {torch.float32}) is None


def test_the_version_of_the_counter_alone_changes_as_in_torch():
    def changes(layer):
        before = [buffer._version for buffer in layer.buffers()]
        layer(random())
        return [buffer._version - version for buffer, version in zip(layer.buffers(), before, strict=True)]

    ours, torchs = map(changes, layers())
    assert ours == torchs == [0, 0, 1]


def test_a_kept_exchange_holds_no_buffers():
    made = []

    class Noted(call.NativeExchange):
        def normalise(self, *given):
            made.append(self)
            return super().normalise(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "NativeExchange", Noted)
        layers()[0](random())
    assert [exchange.running for exchange in made] == [None]


def test_cuda_divides_by_counts_as_tensors():
    """To divide by a number, CUDA multiplies by its reciprocal, which changes last bits."""
    sums = torch.ones(3, dtype=torch.float64, device="meta")
    divisors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__truediv__", lambda one, other: divisors.append(other) or one)
        moments = ChannelMoments(6, torch.stack((sums, sums)))
        moments.mean()
        moments.variance(unbiased=True)
    assert len(divisors) == 3
    assert all(isinstance(each, torch.Tensor) for each in divisors)
