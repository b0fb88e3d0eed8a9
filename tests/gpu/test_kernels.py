"""The tests of `tests/unit/client/test_kernels.py`, run here with CUDA's own operators."""

import functools

import pytest
import torch

from client.ops import engine
from client.ops.reference import Fused
from client.ops.statistics import ChannelMoments, ChannelStatistics
from gpu.conftest import CUDA
from unit.client import test_kernels
from unit.client.test_kernels import *  # noqa: F403 - all its tests run here too


@pytest.fixture(params=[CUDA])
def device(request):
    return request.param


@pytest.fixture(autouse=True, params=["reference", "fused"])
def backend(request, device, monkeypatch):
    """Move all steps to the device; arguments and results stay on the CPU."""
    used = []
    for kind in (test_kernels.Reference, Fused):
        for name in test_kernels.STEPS:
            note = test_kernels.noted(getattr(kind, name), (kind.__name__.lower(), name), used)
            monkeypatch.setattr(kind, name, note)
    monkeypatch.setattr(Fused, "supports", lambda *_: True)
    monkeypatch.setattr(engine, "BACKENDS", test_kernels.BACKENDS[request.param])
    for name in test_kernels.STEPS:
        monkeypatch.setattr(engine, name, on(device, getattr(engine, name)))
    return request.param, used


def on(device, function):
    there, back = (functools.partial(moved, device=where) for where in (device, "cpu"))

    @functools.wraps(function)
    def run(*given):
        return back(function(*map(there, given)))

    return run


def moved(value, device):
    if isinstance(value, (ChannelMoments, ChannelStatistics)):
        return value.beside(torch.empty(0, device=device))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def test_sums_over_very_many_samples_lose_no_digits(request, backend):
    if "fused" in backend:
        request.getfixturevalue("inexact_sums_of_many")
    test_kernels.test_sums_over_very_many_samples_lose_no_digits()


@pytest.mark.parametrize("neighbour", [0.0, 1e3])
def test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(request, backend, neighbour):
    if "fused" in backend:
        request.getfixturevalue("infinity_in_a_moving_mean")
    test_kernels.test_infinity_is_no_nan_in_the_sums_whatever_its_neighbours_are(neighbour)
