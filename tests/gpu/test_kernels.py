"""The tests of the kernels with statistics on the host, by CUDA's operators: on a GPU, or by stand-ins on a CPU."""

import functools

import pytest
import torch

from client.kernels import backends, cuda, dispatch
from client.kernels.statistics import Statistics
from support import cuda_stand_ins
from unit.client import test_kernels
from unit.client.test_kernels import *  # noqa: F403 - all its tests run here too


@pytest.fixture(autouse=True)
def way(device, monkeypatch):
    """Sends all kernels CUDA's way; their arguments and results stay on the CPU."""
    used = []
    for name in ("moments", "normalise", "backward_sums", "input_gradient"):
        monkeypatch.setattr(cuda, name, note(getattr(cuda, name), used))
    if device == "cuda":
        for name in ("moments", "normalise", "backward_sums", "input_gradient"):
            monkeypatch.setattr(dispatch, name, on_device(getattr(dispatch, name)))
        yield used
        return
    monkeypatch.setattr(backends.Cpu, "takes", staticmethod(lambda _: False))
    monkeypatch.setattr(backends.Cuda, "takes", staticmethod(lambda x: x.numel() > 0))
    with cuda_stand_ins.on_the_cpu():
        yield used


def note(function, used):
    @functools.wraps(function)
    def run(*args):
        used.append(function.__name__)
        return function(*args)

    return run


def on_device(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        moved = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
        found = function(*moved, **kwargs)
        return found.cpu() if isinstance(found, torch.Tensor) else found

    return run


def test_all_four_steps_go_cudas_way(way):
    test_kernels.test_backward_is_torchs((4, 3, 5, 2), torch.float32, affine=True)
    x = test_kernels.random((4, 3, 5, 2), torch.float32)
    dispatch.normalise(x, test_kernels.statistics_of(x), None, None)
    assert set(way) == {"moments", "normalise", "backward_sums", "input_gradient"}


@pytest.mark.usefixtures("inexact_sums_of_many")
def test_sums_over_very_many_samples_lose_no_digits():
    test_kernels.test_sums_over_very_many_samples_lose_no_digits()


@pytest.mark.parametrize("neighbour", [0.0, 1e3])
@pytest.mark.usefixtures("infinity_in_a_moving_mean")
def test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(neighbour):
    test_kernels.test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(neighbour)


def test_a_count_beyond_32_bits_is_no_trouble():
    """The operator's count is an int32, so it gets means instead of sums."""
    x, grad = (test_kernels.random((4, 3, 5), torch.float64, seed) for seed in range(2))
    small = test_kernels.statistics_of(x)
    large = Statistics(2**40, small.mean, small.invstd, small.slope)
    sums = dispatch.backward_sums(grad, x, small)
    found = dispatch.input_gradient(grad, x, large, sums * (2**40 / small.count), None)
    torch.testing.assert_close(found, dispatch.input_gradient(grad, x, small, sums, None), rtol=1e-12, atol=1e-12)


def test_what_float32_rounds_off_the_mean_is_put_back():
    """At mean / std = 10,000 it is up to a thousandth of a deviation."""
    x = test_kernels.random((64, 3, 20), torch.float32) * 0.01 + 100
    wide = x.double().requires_grad_()
    weight, bias = torch.tensor([3.0, -1.0, 0.5]), torch.tensor([0.1, 0.2, 0.3])
    statistics = test_kernels.statistics_of(x, eps=1e-12)
    expected = torch.nn.functional.batch_norm(
        wide, None, None, weight.double(), bias.double(), training=True, eps=1e-12
    )
    found = dispatch.normalise(x, statistics, weight, bias)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    grad = (x - 100) * 1e2 + test_kernels.random((64, 3, 20), torch.float32, 1) * 0.05
    expected.backward(grad.double())
    sums = dispatch.backward_sums(grad, x, statistics)
    gradient = dispatch.input_gradient(grad, x, statistics, sums, weight)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=0, atol=2e-5 * wide.grad.abs().max().item())
