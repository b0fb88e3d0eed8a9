"""The tests of the kernels again, through CUDA's way: on a device where there is one, and everywhere with stand-ins.

The stand-ins compute on the CPU what torch says that its operators compute on CUDA, and hold us to what they ask for.
"""

import functools

import pytest
import torch

from client.kernels import backends, cuda, dispatch, elementwise, layout
from client.kernels.statistics import Statistics
from client.kernels.vectors import compute_type
from unit.client import test_kernels
from unit.client.test_kernels import *  # noqa: F403 - all its tests run here too


def check(x, *vectors):
    """What the operators' code asks for."""
    assert x.is_contiguous() or x.is_contiguous(memory_format=layout.CHANNELS_LAST[x.dim()])
    for vector in vectors:
        assert vector.dtype == compute_type(x)
        assert vector.shape == (x.shape[1],)
        assert vector.is_contiguous()


def spread(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_elemt(x, weight, bias, mean, invstd, _eps):
    check(x, weight, bias, mean, invstd)
    wide = x.to(mean.dtype)
    return ((wide - spread(mean, x)) * spread(invstd, x) * spread(weight, x) + spread(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, *wanted):
    assert wanted == (True, False, False)
    check(x, mean, invstd, weight)
    assert (grad.dtype, grad.stride()) == (x.dtype, x.stride())
    wide = grad.to(mean.dtype)
    return elementwise.total(wide), elementwise.total(wide * (x.to(mean.dtype) - spread(mean, x))), None, None


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    check(x, mean, invstd, weight, sum_dy, sum_dy_xmu)
    assert (grad.dtype, grad.stride()) == (x.dtype, x.stride())
    assert count.dtype == torch.int32
    total = count.sum()
    by_deviation = spread(invstd.square() * sum_dy_xmu / total, x)
    deviations = x.to(mean.dtype) - spread(mean, x)
    through = grad.to(mean.dtype) - spread(sum_dy / total, x) - deviations * by_deviation
    return (through * spread(invstd * weight, x)).to(x.dtype)


def batch_norm_update_stats(x, running_mean, running_var, momentum):
    check(x)
    assert (running_mean, running_var, momentum) == (None, None, 0.0)
    wide = x.to(compute_type(x))
    mean = elementwise.total(wide) / (x.numel() // x.shape[1])
    return mean, elementwise.total((wide - spread(mean, x)).square()) / (x.numel() // x.shape[1])


STAND_INS = (batch_norm_elemt, batch_norm_backward_reduce, batch_norm_backward_elemt, batch_norm_update_stats)


@pytest.fixture(
    autouse=True,
    params=[
        "stand-ins",
        pytest.param(
            "device",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        ),
    ],
)
def way(request, monkeypatch):
    """Sends all kernels CUDA's way; their arguments and results stay on the CPU."""
    used = []
    for name in ("moments", "normalise", "backward_sums", "input_gradient"):
        monkeypatch.setattr(cuda, name, note(getattr(cuda, name), used))
    if request.param == "stand-ins":
        monkeypatch.setattr(backends.Cpu, "takes", staticmethod(lambda _: False))
        monkeypatch.setattr(backends.Cuda, "takes", staticmethod(lambda x: x.numel() > 0))
        for stand_in in STAND_INS:
            monkeypatch.setattr(torch, stand_in.__name__, stand_in)
    else:
        for name in ("moments", "normalise", "backward_sums", "input_gradient"):
            monkeypatch.setattr(dispatch, name, on_device(getattr(dispatch, name)))
    return used


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
