"""The compiled kernels, where numba is installed: beside float64, the plain ones, and in the whole layer."""

import importlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from support.paths import ROOT, TESTS

pytest.importorskip("numba", reason="the compiled kernels come with statsd-bn[compiled]")

from client.kernels import dispatch, numba_backend, torch_threads
from client.kernels.statistics import Statistics
from statsd_bn.errors import ConfigurationError

PLANES = [(7, 3, 5, 9), (4, 3, 64), (2, 5, 1, 17), (3, 1, 12, 12), (2, 2, 7, 900), (5, 4, 2, 3, 7)]
ROWS = [(7, 3), (300, 5), (2, 700), (1, 600), (9, 1, 1, 1)]
CASES = [
    *(pytest.param(shape, torch.contiguous_format, dtype) for shape in PLANES for dtype in ("float32", "bfloat16")),
    *(pytest.param(shape, torch.contiguous_format, "bfloat16") for shape in ROWS),
    *(pytest.param(shape, torch.channels_last, "bfloat16") for shape in PLANES if len(shape) == 4),
]


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.setattr(numba_backend, "_kernels", None)
    numba_backend.use_compiled_kernels()


def random(shape, dtype=torch.float32, seed=0, layout=torch.contiguous_format):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.contiguous(memory_format=layout)


def without(monkeypatch, function, *arguments):
    """The plain way's result."""
    with monkeypatch.context() as patch:
        patch.setattr(numba_backend, "_kernels", None)
        return function(*arguments)


def channels(x):
    """Shape (C, N * positions), float64."""
    return x.double().transpose(0, 1).flatten(1)


def steps(x, grad, weight, bias):
    """All that a layer asks of its kernels."""
    moments = dispatch.moments(x)
    statistics = Statistics.of(moments, 1e-5, "plus")
    sums = dispatch.backward_sums(grad, x, statistics)
    output = dispatch.normalise(x, statistics, weight, bias)
    return moments, output, sums, dispatch.input_gradient(grad, x, statistics, sums, weight)


def check(x, grad, weight, bias):
    """Compares with autograd in float64: vectors to float32's digits, tensors to one rounding of their type."""
    assert numba_backend.takes(x)
    moments, output, sums, gradient = steps(x, grad, weight, bias)
    reference = x.double().requires_grad_()
    expected = torch.nn.functional.batch_norm(reference, None, None, weight.double(), bias.double(), training=True)
    expected.backward(grad.double())
    values, grads = channels(x), channels(grad)
    deviations = values - values.mean(1, keepdim=True)
    scale = deviations.square().mean(1).sqrt().numpy() + 1e-3
    np.testing.assert_allclose(moments.mean / scale, values.mean(1).numpy() / scale, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(moments.variance(), values.var(1, correction=0).numpy(), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(sums[0], grads.sum(1).numpy(), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(sums[1] / scale, (grads * deviations).sum(1).numpy() / scale, rtol=1e-5, atol=1e-4)
    epsilon = torch.finfo(x.dtype).eps
    for found, exact in ((output, expected.detach()), (gradient, reference.grad)):
        assert (found.dtype, found.stride()) == (x.dtype, torch.empty_like(x).stride())
        torch.testing.assert_close(found.double(), exact, rtol=0.51 * epsilon + 2e-5, atol=2e-5)


@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES)
def test_every_step_is_that_of_float64_rounded_once(shape, layout, dtype, mean):
    dtype = getattr(torch, dtype)
    if torch.Size(shape).numel() // shape[1] == 1:
        pytest.skip("one value per channel has no variance")
    x = random(shape, layout=layout).add(mean).to(dtype)
    grad = random(shape, dtype, 1, layout)
    check(x, grad, random((shape[1],), seed=2), random((shape[1],), seed=3))


def test_a_mean_of_ten_thousand_deviations_costs_no_digit():
    x = random((16, 3, 20, 20)) + 1e4 * torch.tensor([1.0, -1, 0]).view(3, 1, 1)
    check(x, random(x.shape, seed=1), torch.ones(3), torch.zeros(3))


def test_one_outlier_in_a_channel_costs_the_others_nothing():
    x = random((16, 3, 20, 20))
    x[0, 1, 0, 0] = 1e4
    check(x, random(x.shape, seed=1), torch.ones(3), torch.zeros(3))


def test_one_value_per_channel_is_its_own_mean():
    x = random((1, 5), torch.bfloat16)
    found = dispatch.moments(x)
    assert (found.count, found.mean.tolist()) == (1, x[0].tolist())
    assert np.allclose(found.variance(), 0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1, 2**23 + 3), torch.float32), ((3, 2, 1024, 600), torch.float32), ((2**22, 1), torch.bfloat16)],
)
def test_sums_over_very_many_values_lose_no_digits(shape, dtype):
    """All alike: added one by one in float32 the roundings add up too, to a part in a thousand."""
    x, grad = torch.full(shape, 0.7, dtype=dtype), torch.full(shape, 0.3, dtype=dtype)
    first, second = dispatch.backward_sums(grad, x, Statistics(1, *np.array([[0.0], [1.0], [1.0]]).repeat(shape[1], 1)))
    number, factors = x.numel() // shape[1], (grad.flatten()[0].item(), x.flatten()[0].item())
    np.testing.assert_allclose(first, number * factors[0], rtol=1e-5)
    np.testing.assert_allclose(second, number * factors[0] * factors[1], rtol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_their_channel(bad, layout, monkeypatch):
    x, grad = (random((4, 3, 5, 5), torch.bfloat16, seed, layout) for seed in range(2))
    x[1, 2, 3, 3] = bad
    grad[2, 0, 1, 1] = bad
    found, plain = steps(x, grad, None, None), without(monkeypatch, steps, x, grad, None, None)
    assert found[1][:, 2].isnan().all()
    assert found[1][:, :2].isfinite().all()
    assert np.isfinite(found[0].mean).tolist() == [True, True, False]
    np.testing.assert_array_equal(np.isfinite(found[2]), np.isfinite(plain[2]))
    assert torch.equal(found[3].isfinite(), plain[3].isfinite())
    assert found[3][:, 1].isfinite().all()


def test_every_bfloat16_is_read_and_every_tie_goes_to_the_even_one():
    """Through scaling by 1: all bit patterns come back. Halves of the last place are rounded as torch rounds them."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(1, 1, -1)
    for factor in (1.0, 1 + 2**-8, 0.5, 1 + 2**-7, 3.0):
        found = numba_backend.normalise(every, np.zeros(1), np.full(1, factor), None, None)
        expected = (every.float() * factor + 0).to(torch.bfloat16)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_no_nan_rounds_up_to_a_number():
    """All bits of this one are set, so that one more makes it -0."""
    nan = torch.from_numpy(np.array([0x7FFFFFFF], np.uint32).view(np.float32))
    assert (
        numba_backend.normalise(torch.ones(1, 1, 40, dtype=torch.bfloat16), np.zeros(1), np.ones(1), None, nan)
        .isnan()
        .all()
    )


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(random((4, 3, 6, 6))[:, :, ::2], id="gaps"),
        pytest.param(random((4, 6, 6, 6), layout=torch.channels_last)[:, ::2], id="gaps, channels_last"),
        pytest.param(random((1, 3, 1, 1)).expand(4, 3, 5, 5), id="expanded"),
        pytest.param(random((4, 3, 5, 6), layout=torch.channels_last), id="float32 in rows"),
        pytest.param(random((4, 3, 5, 5), torch.float64), id="float64"),
        pytest.param(random((4, 3, 5, 5), torch.float16), id="float16"),
    ],
)
def test_what_it_does_not_take_goes_the_plain_way(x, monkeypatch):
    assert not numba_backend.takes(x)
    grad = random(x.shape, x.dtype, 1)
    for found, plain in zip(
        steps(x, grad, None, None)[1:], without(monkeypatch, steps, x, grad, None, None)[1:], strict=True
    ):
        np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: TwoTensor(random((4, 3, 5, 5)), random((4, 3, 5, 5))), id="subclass without memory"),
        pytest.param(lambda: FakeTensorMode().from_tensor(random((4, 3, 5, 5))), id="fake"),
        pytest.param(lambda: torch._neg_view(random((4, 3, 5, 5))), id="negated view"),
        pytest.param(lambda: torch.empty(0, 3, 5, 5), id="empty"),
        pytest.param(lambda: torch.empty(4, 3, 5, 5, device="meta"), id="meta"),
    ],
)
def test_what_has_no_such_memory_is_left_to_torch(make):
    assert not numba_backend.takes(make())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda vector: vector.repeat_interleave(2)[::2], id="strided"),
        pytest.param(lambda vector: torch._neg_view(-vector), id="negated view"),
        pytest.param(nn.Parameter, id="parameter"),
        pytest.param(lambda vector: vector[:1].expand(3), id="expanded"),
    ],
)
def test_parameters_of_every_type_and_form_are_read(dtype, form):
    x, grad = random((4, 3, 5, 5)), random((4, 3, 5, 5), seed=1)
    weight, bias = (form(random((3,), seed=seed).to(dtype)).detach() for seed in (2, 3))
    check(x, grad, weight, bias)


def test_a_gradient_that_is_a_negated_view_is_read():
    x, grad = random((4, 3, 5, 5)), random((4, 3, 5, 5), seed=1)
    assert bits(x, torch._neg_view(-grad)) == bits(x, grad)


@pytest.mark.parametrize("shape", [(1,), (0,), (4,), (3, 1), ()])
def test_parameters_of_another_shape_are_refused(shape):
    x, wrong = random((4, 3, 5, 5)), torch.ones(shape)
    with pytest.raises(ValueError, match=r"expected weight and bias of shape \(3,\), got "):
        numba_backend.normalise(x, np.zeros(3), np.ones(3), wrong, None)
    with pytest.raises(ValueError, match=r"expected weight and bias of shape \(3,\), got "):
        numba_backend.input_gradient(x, x, np.zeros(3), np.ones(3), np.zeros((2, 3)), wrong)


def test_a_parameter_whose_memory_was_freed_is_refused():
    x, weight = random((4, 3, 5, 5)), torch.ones(3)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="expected a tensor with memory of its own, got Tensor"):
        numba_backend.normalise(x, np.zeros(3), np.ones(3), weight, None)


def test_gaps_in_bfloat16_and_in_the_gradient_are_closed_first():
    x = random((4, 6, 7, 6), torch.bfloat16, layout=torch.channels_last)
    for part, grad in ((x[:, ::2], x[:, 1::2]), (x[:, :3, 1:], x.contiguous()[:, 3:, 1:])):
        check(part, grad, torch.ones(3), torch.zeros(3))


def bits(x, grad):
    moments, output, sums, gradient = steps(x, grad, None, None)
    tensors = [tensor.float().numpy().tobytes() for tensor in (output, gradient)]
    return moments.vectors.tobytes(), sums.tobytes(), *tensors


@pytest.mark.parametrize("part", [500, 2000, 2**18])
def test_rows_are_added_in_parts_to_the_last(part, monkeypatch):
    """1,287 rows of 7 channels, 73 of them beside each other, which leaves 46 for the last."""
    monkeypatch.setattr(numba_backend, "PART", part)
    x, grad = (random((9, 7, 11, 13), torch.bfloat16, seed, torch.channels_last) for seed in range(2))
    check(x, grad, torch.ones(7), torch.zeros(7))


def test_several_threads_may_call_at_once():
    tensors = [tuple(random((8, 16, 50, 50), seed=2 * each + seed) for seed in range(2)) for each in range(6)]
    expected = [bits(*pair) for pair in tensors]
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: bits(*tensors[i])})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((6, 5, 40, 50), torch.float32, torch.contiguous_format),
        ((7, 3, 111, 113), torch.bfloat16, torch.contiguous_format),
        ((7, 3, 111, 113), torch.bfloat16, torch.channels_last),
        ((40, 600, 7, 7), torch.bfloat16, torch.channels_last),
    ],
)
def test_any_number_of_threads_gives_the_same_bits(shape, dtype, layout, threads, set_threads):
    x, grad = (random(shape, dtype, seed, layout) for seed in range(2))
    set_threads(1)
    expected = bits(x, grad)
    set_threads(threads)
    assert bits(x, grad) == expected


def test_a_torch_that_lends_no_threads_gives_the_same_bits(monkeypatch, set_threads):
    set_threads(2)
    x, grad = (random((6, 5, 40, 50), torch.bfloat16, seed) for seed in range(2))
    expected = bits(x, grad)
    monkeypatch.setattr(torch_threads, "_loop", lambda: torch_threads._in_this_thread)
    assert bits(x, grad) == expected


def test_without_a_folder_for_what_is_compiled_it_says_what_to_set(monkeypatch):
    def fail(_):
        raise RuntimeError("cannot cache function 'sum_planes': no locator available")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigurationError, match="set NUMBA_CACHE_DIR to one; cannot cache function"):
        numba_backend.use_compiled_kernels()


def test_without_numba_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "client.kernels.numba_kernels", None)
    with pytest.raises(ConfigurationError, match=r"statsd-bn\[compiled\]"):
        numba_backend.use_compiled_kernels()


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_layer_stays_transparent_with_them():
    """The layer's own tests, in a process whose environment asks for the compiled kernels."""
    units, integration = TESTS / "unit" / "client", TESTS / "integration"
    modules = [units / "test_kernels.py", units / "test_cpu.py", integration / "test_transparency.py"]
    environment = os.environ | {"STATSD_BN_COMPILED": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, modules)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
