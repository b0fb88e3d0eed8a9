"""What a CPU's kernels do otherwise: sums of raw values where these are near zero, in columns, planes and blocks."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from client.kernels import cpu, dispatch
from client.kernels.statistics import Statistics

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laid(x, layout):
    return x.contiguous(memory_format=layout) if x.dim() == 4 else x


def exact(x):
    """Mean and variance per channel in float64."""
    values = x.double().transpose(0, 1).flatten(1)
    return values.mean(1).numpy(), values.var(1, correction=0).numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ratio", [0.0, -1.9, 2.5, 30.0])
def test_the_variance_is_as_right_where_values_are_not_centred_as_where_they_are(ratio, layout):
    x = laid(random(8, 3, 40, 40) + ratio, layout)
    assert cpu.are_near_zero(*cpu.sums(x, x), 8 * 40 * 40) == (abs(ratio) < 2)
    found, (mean, variance) = dispatch.moments(x), exact(x)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.variance(), variance, rtol=1e-6)


def test_one_channel_far_from_zero_is_enough_to_centre_all():
    x = random(8, 3, 40, 40)
    x[:, 1] += 1e4
    found, (mean, variance) = dispatch.moments(x), exact(x)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(found.variance(), variance, rtol=1e-5)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(random(1, 3).expand(2**20 + 1, 3).contiguous(), id="samples"),
        pytest.param(random(1, 3, 1, 1).expand(2, 3, 1024, 512).to(memory_format=torch.channels_last), id="pixels"),
        pytest.param(random(1, 3, 1).expand(1, 3, 2**20).contiguous(), id="one long plane"),
        pytest.param(random(1, 3, 1).expand(1, 3, 2**20 + 1).contiguous(), id="one long plane that cannot be cut"),
    ],
)
def test_sums_over_very_many_values_lose_no_digits(x):
    """All alike: added one by one in float32 the roundings add up too, to a part in a thousand."""
    value = x.flatten(2)[0, :, 0].double().numpy() if x.dim() > 2 else x[0].double().numpy()
    number = x.numel() // 3
    statistics = Statistics(number, np.zeros(3), np.ones(3), np.ones(3))
    first, second = dispatch.backward_sums(torch.full_like(x, 0.3), x, statistics)
    np.testing.assert_allclose(first, number * float(np.float32(0.3)), rtol=2e-5)
    np.testing.assert_allclose(second, number * float(np.float32(0.3)) * value, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_far_from_zero_are_centred_in_blocks(layout, dtype, monkeypatch):
    """Seven samples in blocks of two, or 84 rows in blocks of some: the last is smaller."""
    x = laid((random(7, 5, 3, 4) + torch.tensor([0.0, 10, 1e3, -1e4, 3]).view(5, 1, 1)).to(dtype), layout)
    monkeypatch.setattr(cpu, "BLOCK", 120)
    found, (mean, variance) = dispatch.moments(x), exact(x)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-7, atol=1e-6)
    np.testing.assert_allclose(found.variance(), variance, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", [3, 9])
def test_blocks_make_no_difference(side, layout, dtype, monkeypatch):
    """Seven samples, or seven times so many rows, in blocks of some: the last is smaller. Short planes and others."""
    x, grad = (laid(random(7, 5, side, side, seed=seed).to(dtype), layout) for seed in range(2))
    vectors = random(3, 5, seed=2).double()
    expected = cpu.combine(grad, x, *vectors.numpy())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for name in ("BLOCK", "WIDENED_BLOCK"):
        monkeypatch.setattr(cpu, name, 10 * side**2)
    found = cpu.combine(grad, x, *vectors.numpy())
    assert torch.equal(found, expected)
    scaled = cpu.scale(x, *vectors[1:].numpy())
    by_grad, factor, addend = vectors.view(3, 1, 5, 1, 1)
    exactly = (grad.double() * by_grad + x.double() * factor + addend).to(dtype)
    torch.testing.assert_close(found, exactly, rtol=torch.finfo(dtype).eps, atol=1e-6)
    exactly = (x.double() * factor + addend).to(dtype)
    torch.testing.assert_close(scaled, exactly, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_of_rows_that_does_not_divide_is_summed_to_the_last(dtype):
    """1,021 is a prime, and 1,024 columns make 341 rows of 3 channels."""
    x, grad = (random(1021, 3, seed=seed).to(dtype) for seed in range(2))
    found = cpu.sums(grad, x)
    expected = torch.stack((grad.double().sum(0), (grad.double() * x.double()).sum(0))).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (20, 31)], ids=["planes", "rows"])
def test_real_tensors_pass_after_fake_ones(shape):
    """Estimators of memory and operations run a model under such a mode."""
    cpu._zero_and_one.cache_clear()
    with FakeTensorMode(), pytest.raises((RuntimeError, AssertionError)):
        dispatch.moments(torch.randn(shape))
    x = random(*shape)
    found, (mean, _) = dispatch.moments(x), exact(x)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cpu.scale(x, np.ones(shape[1]), np.zeros(shape[1])), x)


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the system."""
    asked = []
    monkeypatch.setattr(cpu, "_madvise", lambda *arguments: asked.append(arguments))
    return asked


def test_what_is_large_lies_on_whole_pages_of_its_own(asked, monkeypatch):
    """Never on its neighbours': what the system is asked for begins and ends inside the tensor."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x = torch.empty(3, 2**20)
    one = np.ones(2**20)
    output = cpu.scale(x, one, one)
    cpu.scale(x[:, :5].contiguous(), one[:5], one[:5])
    ((start, length, _),) = asked
    assert start % cpu.PAGE == length % cpu.PAGE == 0
    assert output.data_ptr() <= start < start + length <= output.data_ptr() + output.nbytes
    assert length > output.nbytes - 2 * cpu.PAGE


def test_several_threads_touch_pages_of_the_usual_size(asked, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = torch.randn(3, 2**20)
    one = np.ones(2**20)
    assert torch.equal(cpu.scale(x, one, 0 * one), x)
    assert torch.equal(cpu.combine(x, x, one, 0 * one, 0 * one), x)
    assert asked == []


@pytest.mark.parametrize("samples", [1, 2, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_slices_are_computed_to_what_large_ones_are(dtype, samples, monkeypatch):
    """Planes of few samples are summed by one reduction, and normalised by one operator."""
    x, grad = (random(samples, 5, 3, 4, seed=seed).to(dtype) for seed in range(2))
    weight, bias = random(2, 5, seed=2).to(dtype)
    mean, variance = exact(x)
    statistics = Statistics(samples * 12, mean, (variance + 1e-5) ** -0.5, np.ones(5))

    def computed():
        return dispatch.backward_sums(grad, x, statistics), dispatch.normalise(x, statistics, weight, bias)

    small = computed()
    asked = []
    monkeypatch.setattr(cpu, "scale", lambda *arguments, scale=cpu.scale: asked.append(1) or scale(*arguments))
    monkeypatch.setattr(cpu, "SMALL", 0)
    large = computed()
    assert asked == [1]
    np.testing.assert_allclose(small[0], large[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(small[1], large[1], rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    exactly = (x.double() - torch.tensor(mean).view(5, 1, 1)) * torch.tensor(statistics.invstd).view(5, 1, 1)
    exactly = exactly * weight.double().view(5, 1, 1) + bias.double().view(5, 1, 1)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(small[1].double(), exactly, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("x", [random(2, 5, 3, 4), random(2, 5, 3, 4).double()], ids=["float32", "float64"])
def test_one_operator_normalises_a_small_slice(x, monkeypatch):
    monkeypatch.setattr(cpu, "scale", None)
    mean, variance = exact(x)
    statistics = Statistics(24, mean, (variance + 1e-5) ** -0.5, np.ones(5))
    expected = torch.nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(dispatch.normalise(x, statistics, None, None), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_slice_whose_channel_is_zero_is_not_nan_with_a_tiny_eps(dtype):
    """Float32 has no such number, but has one over its square root."""
    x = random(4, 2, 5).to(dtype)
    x[:, 0] = 0
    statistics = Statistics.of(dispatch.moments(x), 1e-70, "plus")
    output = dispatch.normalise(x, statistics, torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype))
    assert torch.equal(output[:, 0], torch.ones(4, 5, dtype=dtype))
    assert output.isfinite().all()
