"""Local reduction and normalisation against torch's own, for every type and shape."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from client.ops import engine
from client.ops.reference import Fused, Reference
from client.ops.statistics import ChannelMoments, ChannelStatistics
from statsd_bn import Moments
from support import cuda_stand_ins

STEPS = ("moments", "normalise", "backward_sums", "input_gradient")
SHAPES = [(7, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 3, 2)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


BACKENDS = {"reference": (), "fused": (Fused(),)}


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request, monkeypatch):
    used = []
    for kind in (Reference, Fused):
        for name in STEPS:
            monkeypatch.setattr(kind, name, noted(getattr(kind, name), (kind.__name__.lower(), name), used))
    monkeypatch.setattr(Fused, "supports", lambda *_: True)
    monkeypatch.setattr(engine, "BACKENDS", BACKENDS[request.param])
    with cuda_stand_ins.on_the_cpu():
        yield request.param, used


def noted(function, name, used):
    def run(*given):
        used.append(name)
        return function(*given)

    return run


def random(shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def statistics_of(x, eps=1e-5, eps_mode="plus"):
    return ChannelStatistics.of(engine.moments(x), eps, eps_mode)


def test_the_backend_computes_all_four_steps(backend):
    name, used = backend
    x, grad = random((4, 3, 5)), random((4, 3, 5), seed=1)
    statistics = statistics_of(x)
    engine.normalise(x, statistics, None, None)
    engine.input_gradient(grad, x, statistics, engine.backward_sums(grad, x, statistics), None)
    assert set(used) == {(name, step) for step in STEPS}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_moments_are_those_of_the_same_numbers_in_float64(shape, dtype):
    x = random(shape, dtype) * 3 + 1
    found = engine.moments(x)
    exact = x.double().transpose(0, 1).flatten(1)
    assert found.count == exact.shape[1]
    np.testing.assert_allclose(found.mean(), exact.mean(1), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.variance(), exact.var(1, correction=0).numpy(), rtol=1e-5)


def test_sums_over_very_many_samples_lose_no_digits():
    """2^20 equal samples: added one by one in float32, they accumulate a relative rounding error of 1e-3."""
    x, grad = random((1, 3, 4), torch.float32).expand(2**20, 3, 4), random((1, 3, 4), torch.float32, 1) + 1
    found = engine.moments(x)
    exact = x[0].double()
    np.testing.assert_allclose(found.mean(), exact.mean(1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(found.variance(), exact.var(1, correction=0).numpy(), rtol=1e-5)
    statistics = ChannelStatistics.of(found, 1e-5, "plus")
    first, second = engine.backward_sums(grad.expand_as(x), x, statistics)
    products = grad[0].double() * (exact - exact.mean(1, keepdim=True))
    np.testing.assert_allclose(first, 2.0**20 * grad[0].double().sum(1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(second, 2.0**20 * products.sum(1).numpy(), rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_normalise_is_torchs_batch_norm(shape, dtype):
    x, weight, bias = random(shape, dtype), random(3, dtype, 1), random(3, dtype, 2)
    found = engine.normalise(x, statistics_of(x), weight, bias)
    expected = functional.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", ["weight", "bias", "both"])
def test_parameters_may_be_of_a_wider_type_than_the_input(dtype, wide):
    x, grad, weight, bias = random((4, 3, 5), dtype), random((4, 3, 5), dtype, 3), random(3), random(3, seed=1)
    parameters = [
        each if wide in {name, "both"} else each.float() for name, each in (("weight", weight), ("bias", bias))
    ]
    reference = x.double().requires_grad_()
    expected = functional.batch_norm(reference, None, None, weight, bias, training=True)
    expected.backward(grad.double())
    statistics = statistics_of(x)
    output = engine.normalise(x, statistics, *parameters)
    sums = engine.backward_sums(grad, x, statistics)
    gradient = engine.input_gradient(grad, x, statistics, sums, parameters[0])
    for found, exact in ((output, expected.detach()), (gradient, reference.grad)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_backward_is_torchs(shape, dtype, affine):
    x, grad = random(shape, dtype) + 5, random(shape, dtype, 3)
    weight = random(3, dtype, 1) if affine else None
    reference = x.clone().requires_grad_()
    functional.batch_norm(reference, None, None, weight, None, training=True).backward(grad)
    statistics = statistics_of(x)
    sums = engine.backward_sums(grad, x, statistics)
    found = engine.input_gradient(grad, x, statistics, sums, weight)
    torch.testing.assert_close(found, reference.grad, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_added_in_float32(shape, dtype):
    """Torch's CUDA kernel for contiguous inputs rounds partial sums to half precision."""
    x, grad = random(shape, dtype) + 1, random(shape, dtype, 1) + 1
    found = engine.backward_sums(grad, x, statistics_of(x))
    exact, wide = x.double().transpose(0, 1).flatten(1), grad.double().transpose(0, 1).flatten(1)
    products = wide * (exact - exact.mean(1, keepdim=True))
    for sums, terms in zip(found, (wide, products), strict=True):
        assert ((sums - terms.sum(1)).abs() <= 1e-6 * terms.abs().sum(1)).all()


def test_clamp_keeps_the_variance_at_eps_without_a_gradient():
    x = torch.stack([random((50,)) * 1e-4, random((50,))], 1).requires_grad_()
    eps = 1e-3
    centred = x - x.mean(0)
    expected = centred * centred.square().mean(0).clamp(min=eps) ** -0.5
    grad = random((50, 2), seed=3)
    expected.backward(grad)
    statistics = statistics_of(x.detach(), eps, "clamp")
    found = engine.normalise(x.detach(), statistics, None, None)
    torch.testing.assert_close(found, expected.detach())
    sums = engine.backward_sums(grad, x.detach(), statistics)
    torch.testing.assert_close(engine.input_gradient(grad, x.detach(), statistics, sums, None), x.grad)
    assert not torch.allclose(found, engine.normalise(x.detach(), statistics_of(x.detach(), eps), None, None))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_pass_through_their_channel_and_no_other(bad):
    x = random((4, 3, 5))
    x[1, 2, 3] = bad
    output = engine.normalise(x, statistics_of(x), None, None)
    assert output[:, 2].isnan().all()
    assert output[:, :2].isfinite().all()


@pytest.mark.parametrize("neighbour", [0.0, 1e3])
def test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(neighbour):
    """The backends centre all channels, and infinity minus infinity is NaN."""
    x = random((6, 3))
    x[:, 1] += neighbour
    x[1, 2] = -float("inf")
    assert engine.moments(x).vectors[0, 2] == -np.inf


@pytest.mark.parametrize("ratio", [1e3, 1e4])
def test_a_large_mean_costs_output_and_gradient_no_digits(ratio):
    """The kernel centres the input first: `a*x + b` in float32 would err by ratio * 2^-24 standard deviations."""
    x, grad = (random((64, 3, 8, 8)) + ratio).float(), random((64, 3, 8, 8), torch.float32, 1) + 1
    reference = x.double().requires_grad_()
    expected = functional.batch_norm(reference, None, None, training=True)
    expected.backward(grad.double())
    statistics = statistics_of(x)
    output = engine.normalise(x, statistics, None, None)
    gradient = engine.input_gradient(grad, x, statistics, engine.backward_sums(grad, x, statistics), None)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), reference.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_without_eps_a_constant_channel_is_nan_and_warns_of_nothing(eps_mode):
    x = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    found = engine.normalise(x, statistics_of(x, 0.0, eps_mode), None, None)
    torch.testing.assert_close(found, torch.tensor([[torch.nan, -1.0], [torch.nan, 1.0]]), equal_nan=True)


def test_a_mean_far_from_zero_costs_no_digits():
    """A mean in float32 alone errs by 1e-3 standard deviations."""
    x = random((64, 3, 20), torch.float32) + 10_000
    found = engine.moments(x)
    exact = x.double().transpose(0, 1).flatten(1)
    np.testing.assert_allclose(found.mean(), exact.mean(1).numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.variance(), exact.var(1, correction=0).numpy(), rtol=1e-5)


def test_the_rounding_error_of_a_float32_mean_is_corrected():
    """At mean / std = 10,000 the rounding error is up to 1e-3 standard deviations."""
    x = random((64, 3, 20), torch.float32) * 0.01 + 100
    wide = x.double().requires_grad_()
    weight, bias = torch.tensor([3.0, -1.0, 0.5]), torch.tensor([0.1, 0.2, 0.3])
    statistics = statistics_of(x, eps=1e-12)
    expected = functional.batch_norm(wide, None, None, weight.double(), bias.double(), training=True, eps=1e-12)
    found = engine.normalise(x, statistics, weight, bias)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    grad = (x - 100) * 1e2 + random((64, 3, 20), torch.float32, 1) * 0.05
    expected.backward(grad.double())
    sums = engine.backward_sums(grad, x, statistics)
    gradient = engine.input_gradient(grad, x, statistics, sums, weight)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=0, atol=2e-5 * wide.grad.abs().max().item())


def test_a_count_beyond_32_bits_is_exact():
    """CUDA's operator has a count of 32 bits, so the engine passes means instead of sums."""
    x, grad = (random((4, 3, 5), torch.float64, seed) for seed in range(2))
    small = statistics_of(x)
    large = ChannelStatistics(2**40, small.vectors)
    sums = engine.backward_sums(grad, x, small)
    found = engine.input_gradient(grad, x, large, sums * (2**40 / small.count), None)
    torch.testing.assert_close(found, engine.input_gradient(grad, x, small, sums, None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_statistics_have_the_bits_of_ieee_754(count, is_tensor, eps_mode):
    """All devices must compute the same bits; numpy rounds each step to nearest."""
    sums = random((100,)) if count else torch.zeros(100, dtype=torch.float64)
    squares = sums * sums / max(count, 1) + random((100,), seed=1) * bool(count)
    number = torch.tensor(float(count), dtype=torch.float64) if is_tensor else count
    found = ChannelStatistics.of(ChannelMoments(number, torch.stack((sums, squares))), 0.1, eps_mode)
    moments = Moments(max(count, 1), sums.numpy(), squares.numpy())
    variance = moments.variance()
    held = np.maximum(variance, 0.1) if eps_mode == "clamp" else variance + 0.1
    invstd = 1 / np.sqrt(held) if count else np.zeros(100)
    slope = variance >= 0.1 if eps_mode == "clamp" else np.ones(100)
    assert int(found.count) == max(count, 1)
    for tensor, expected in ((found.mean, moments.mean), (found.invstd, invstd), (found.slope, slope)):
        assert tensor.numpy().tobytes() == expected.astype(np.float64).tobytes()
