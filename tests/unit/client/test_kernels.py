"""Local reduction and normalisation against torch's own, for every type and layout."""

import types

import numpy as np
import pytest
import torch
from torch.nn import functional

from client.kernels import dispatch, vectors
from client.kernels.statistics import Statistics

SHAPES = [(7, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 3, 2)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def statistics_of(x, eps=1e-5, eps_mode="plus"):
    return Statistics.of(dispatch.moments(x), eps, eps_mode)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_moments_are_those_of_the_same_numbers_in_float64(shape, dtype):
    x = random(shape, dtype) * 3 + 1
    found = dispatch.moments(x)
    exact = x.double().transpose(0, 1).flatten(1)
    assert found.count == exact.shape[1]
    np.testing.assert_allclose(found.mean, exact.mean(1).numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.variance(), exact.var(1, correction=0).numpy(), rtol=1e-5)


def test_sums_over_very_many_samples_lose_no_digits():
    """2^20 samples that are alike: added one by one in float32 the roundings add up too, to a part in a thousand."""
    x, grad = random((1, 3, 4), torch.float32).expand(2**20, 3, 4), random((1, 3, 4), torch.float32, 1) + 1
    found = dispatch.moments(x)
    exact = x[0].double()
    np.testing.assert_allclose(found.mean, exact.mean(1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(found.variance(), exact.var(1, correction=0).numpy(), rtol=1e-5)
    statistics = Statistics.of(found, 1e-5, "plus")
    first, second = dispatch.backward_sums(grad.expand_as(x), x, statistics)
    products = grad[0].double() * (exact - exact.mean(1, keepdim=True))
    np.testing.assert_allclose(first, 2.0**20 * grad[0].double().sum(1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(second, 2.0**20 * products.sum(1).numpy(), rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_normalise_is_torchs_batch_norm(shape, dtype):
    x, weight, bias = random(shape, dtype), random(3, dtype, 1), random(3, dtype, 2)
    found = dispatch.normalise(x, statistics_of(x), weight, bias)
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
    output = dispatch.normalise(x, statistics, *parameters)
    sums = dispatch.backward_sums(grad, x, statistics)
    gradient = dispatch.input_gradient(grad, x, statistics, sums, parameters[0])
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
    sums = dispatch.backward_sums(grad, x, statistics)
    found = dispatch.input_gradient(grad, x, statistics, sums, weight)
    torch.testing.assert_close(found, reference.grad, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_added_in_float32(shape, dtype):
    """Torch's CUDA kernel for contiguous inputs rounds partial sums to half precision."""
    x, grad = random(shape, dtype) + 1, random(shape, dtype, 1) + 1
    found = dispatch.backward_sums(grad, x, statistics_of(x))
    exact, wide = x.double().transpose(0, 1).flatten(1), grad.double().transpose(0, 1).flatten(1)
    products = wide * (exact - exact.mean(1, keepdim=True))
    for sums, terms in zip(found, (wide, products), strict=True):
        assert (np.abs(sums - terms.sum(1).numpy()) <= 1e-6 * terms.abs().sum(1).numpy()).all()


def test_clamp_holds_the_variance_at_eps_and_lets_no_gradient_through_it():
    x = torch.stack([random((50,)) * 1e-4, random((50,))], 1).requires_grad_()
    eps = 1e-3
    centred = x - x.mean(0)
    expected = centred * centred.square().mean(0).clamp(min=eps) ** -0.5
    grad = random((50, 2), seed=3)
    expected.backward(grad)
    statistics = statistics_of(x.detach(), eps, "clamp")
    found = dispatch.normalise(x.detach(), statistics, None, None)
    torch.testing.assert_close(found, expected.detach())
    sums = dispatch.backward_sums(grad, x.detach(), statistics)
    torch.testing.assert_close(dispatch.input_gradient(grad, x.detach(), statistics, sums, None), x.grad)
    assert not torch.allclose(found, dispatch.normalise(x.detach(), statistics_of(x.detach(), eps), None, None))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_pass_through_their_channel_and_no_other(bad):
    x = random((4, 3, 5))
    x[1, 2, 3] = bad
    output = dispatch.normalise(x, statistics_of(x), None, None)
    assert output[:, 2].isnan().all()
    assert output[:, :2].isfinite().all()


@pytest.mark.parametrize("neighbour", [0.0, 1e3])
def test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(neighbour):
    """Far from zero all channels are centred, and infinity less infinity is NaN."""
    x = random((6, 3))
    x[:, 1] += neighbour
    x[1, 2] = -float("inf")
    assert dispatch.moments(x).sums[2] == -np.inf


@pytest.mark.parametrize("ratio", [1e3, 1e4])
def test_a_large_mean_costs_neither_output_nor_gradient(ratio):
    """Centred first: `a*x + b` in float32 would be off by ratio * 2^-24 of a standard deviation."""
    x, grad = (random((64, 3, 8, 8)) + ratio).float(), random((64, 3, 8, 8), torch.float32, 1) + 1
    reference = x.double().requires_grad_()
    expected = functional.batch_norm(reference, None, None, training=True)
    expected.backward(grad.double())
    statistics = statistics_of(x)
    output = dispatch.normalise(x, statistics, None, None)
    gradient = dispatch.input_gradient(grad, x, statistics, dispatch.backward_sums(grad, x, statistics), None)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), reference.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_without_eps_a_constant_channel_is_nan_and_warns_of_nothing(eps_mode):
    x = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    found = dispatch.normalise(x, statistics_of(x, 0.0, eps_mode), None, None)
    torch.testing.assert_close(found, torch.tensor([[torch.nan, -1.0], [torch.nan, 1.0]]), equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_vectors_go_to_the_device_in_the_compute_type_and_share_no_memory(dtype):
    given = np.array([0.5, 2.0]), np.array([1.0, 4.0])
    found = vectors.to_device(torch.empty(0, dtype=dtype), *given)
    for vector in given:
        vector.fill(9.0)
    assert {vector.dtype for vector in found} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert [vector.tolist() for vector in found] == [[0.5, 2.0], [1.0, 4.0]]


def test_all_vectors_go_to_cuda_in_one_copy_through_pinned_memory(monkeypatch):
    copies = []
    monkeypatch.setattr(vectors.cuda, "to_device", lambda *arguments: copies.append(arguments) or arguments[1:])
    x = types.SimpleNamespace(is_cpu=False, is_cuda=True)
    first, second = np.array([0.5]), np.array([2.0])
    assert vectors.to_device(x, first, second) == (first, second)
    assert copies == [(x, first, second)]
