"""The tests of the kernels with statistics that stay on the device: elementwise, and through CUDA's operators.

They run on a GPU, and on the CPU, where CUDA's operators are stand-ins.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from client.kernels import dispatch, fused, on_device
from client.kernels.device_elementwise import DeviceElementwise
from client.kernels.device_statistics import DeviceMoments, DeviceStatistics
from client.kernels.fused import Fused
from client.kernels.statistics import Statistics
from statsd_bn import Moments
from support import cuda_stand_ins
from unit.client import test_kernels
from unit.client.test_kernels import *  # noqa: F403 - all its tests run here too


@pytest.fixture(autouse=True, params=["elementwise", "fused"])
def way(request, device, monkeypatch):
    """Sends all steps through `on_device`; what they are given and return is still that of `dispatch`."""
    used = []
    for kind in (DeviceElementwise, Fused):
        for name in ("moments", "normalise", "backward_sums", "input_gradient"):
            monkeypatch.setattr(kind, name, note(getattr(kind, name), (kind.__name__, name), used))
    monkeypatch.setattr(fused, "takes", lambda _, mask: request.param == "fused" and mask is None)
    for name, step in steps(device).items():
        monkeypatch.setattr(dispatch, name, step)
    with cuda_stand_ins.on_the_cpu() if device == "cpu" else nullcontext():
        yield used


def steps(device):
    """The functions of `dispatch` on a device: tensors come from the CPU and go there, and vectors are numpy's."""

    def moments(x, mask=None):
        return on_device.moments(x.to(device), mask).on_host()

    def normalise(x, found, *parameters):
        there = (None if each is None else each.to(device) for each in parameters)
        return on_device.normalise(x.to(device), moved(found, device), *there).cpu()

    def backward_sums(grad, x, found):
        return on_device.backward_sums(grad.to(device), x.to(device), moved(found, device)).cpu().numpy()

    def input_gradient(grad, x, found, sums, weight):
        weight = None if weight is None else weight.to(device)
        sums = torch.from_numpy(sums).to(device)
        return on_device.input_gradient(grad.to(device), x.to(device), moved(found, device), sums, weight).cpu()

    return {step.__name__: step for step in (moments, normalise, backward_sums, input_gradient)}


def note(function, name, used):
    def run(*given):
        used.append(name)
        return function(*given)

    return run


def moved(found: Statistics, device: str) -> DeviceStatistics:
    return DeviceStatistics(
        torch.tensor(float(found.count), dtype=torch.float64, device=device),
        *(torch.tensor(each, device=device) for each in (found.mean, found.invstd, found.slope)),
    )


def test_all_four_steps_go_this_way(way, request):
    test_kernels.test_backward_is_torchs((4, 3, 5, 2), torch.float32, affine=True)
    x = test_kernels.random((4, 3, 5, 2), torch.float32)
    dispatch.normalise(x, test_kernels.statistics_of(x), None, None)
    kind = "Fused" if "fused" in request.node.callspec.id else "DeviceElementwise"
    assert set(way) == {(kind, name) for name in ("moments", "normalise", "backward_sums", "input_gradient")}


def test_sums_over_very_many_samples_lose_no_digits(request):
    if "fused" in request.node.callspec.id:
        request.getfixturevalue("inexact_sums_of_many")
    test_kernels.test_sums_over_very_many_samples_lose_no_digits()


@pytest.mark.parametrize("neighbour", [0.0, 1e3])
def test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(request, neighbour):
    if "fused" in request.node.callspec.id:
        request.getfixturevalue("infinity_in_a_moving_mean")
    test_kernels.test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(neighbour)


def test_a_mean_far_from_zero_costs_no_digits():
    """In float32 the mean alone is off by a thousandth of a deviation."""
    x = test_kernels.random((64, 3, 20), torch.float32) + 10_000
    found = dispatch.moments(x)
    exact = x.double().transpose(0, 1).flatten(1)
    np.testing.assert_allclose(found.mean, exact.mean(1).numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.variance(), exact.var(1, correction=0).numpy(), rtol=1e-5)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("count", [0, 2, 7])
def test_statistics_are_those_of_the_host_to_the_last_bit(device, count, eps_mode):
    first, second = torch.zeros(2, 5, dtype=torch.float64)
    if count:
        first = test_kernels.random((5,))
        second = first * first / count + test_kernels.random((5,), seed=1)
    expected = Statistics.of(Moments(count, first.numpy(), second.numpy()), 0.1, eps_mode)
    number = torch.tensor(float(count), dtype=torch.float64, device=device)
    moments = DeviceMoments(number, first.to(device), second.to(device))
    found = DeviceStatistics.of(moments, 0.1, eps_mode)
    assert int(found.count) == expected.count
    for name in ("mean", "invstd", "slope") if count else ("mean", "invstd"):
        assert getattr(found, name).cpu().numpy().tobytes() == getattr(expected, name).tobytes(), name
