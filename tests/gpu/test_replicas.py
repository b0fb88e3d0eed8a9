"""Replicas of one process on a GPU: their results, and that the host never waits for the device."""

from functools import partial

import pytest
import torch
from torch import nn

import client
from client.ops.functional import in_streams
from support.cuda_stand_ins import as_on_cuda
from support.no_host import nobody_waits_for
from support.replicas_on_devices import OPTIONS, RUNS, exchanges_noted, training
from support.shards import assert_equal

# Torch warns the first time that a test makes it refuse host synchronisation.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("run", RUNS)
def test_the_host_waits_for_no_device_and_results_equal_those_of_the_host(device, run, options):
    assert_equal(on(device, run, options), training(run, options), 1e-4)


@pytest.mark.parametrize(
    ("run", "options"), [*((run, {}) for run in RUNS), *((RUNS[-1], one) for one in OPTIONS.values())]
)
def test_the_host_waits_for_no_device_in_second_derivatives_either(device, run, options):
    options = options | {"dtype": torch.float64}
    assert_equal(on(device, run, options, penalty=True), training(run, options, penalty=True), 1e-8)


def on(device, run, options, **how):
    with exchanges_noted() as made, as_on_cuda(device):
        found = training(run, options, partial(nobody_waits_for, device), device, **how)
    assert made
    return {name: value.cpu() for name, value in found.items()}


def test_virtual_replicas_on_one_device_equal_the_whole_batch(device):
    x, factors = torch.randn(2, 8, 3, 5, 5, dtype=torch.float64).to(device)
    results = []
    for replicas in (1, 4):
        layer = (nn.BatchNorm2d if replicas == 1 else client.SynchronizedBatchNorm2d)(3).double().to(device)
        wrapped = client.DataParallelWithCallback(layer, [device] * replicas)
        leaf = x.clone().requires_grad_()
        with as_on_cuda(device):
            output = wrapped(leaf)
            (output * factors).sum().backward()
        results.append((output, leaf.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_replicas_on_two_devices_equal_those_on_one(device):
    if device == "cuda" and torch.cuda.device_count() == 1:
        pytest.skip("one CUDA device")
    first, second = ("cuda:0", "cuda:1") if device == "cuda" else ("cpu", "cpu")
    torch.manual_seed(0)
    x = torch.randn(8, 4, 5)
    results = []
    for devices in ([first, first], [first, second]):
        model = client.SynchronizedBatchNorm1d(4).to(first)
        wrapped = client.DataParallelWithCallback(model, devices)
        side = [torch.cuda.Stream(each) for each in devices] if device == "cuda" else []
        with as_on_cuda(device), in_streams(side):
            leaf = x.to(first).requires_grad_()
            output = wrapped(leaf)
            (output * output.detach().cumsum(0)).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize(first)
        results.append([each.cpu() for each in (output, leaf.grad, model.running_mean, model.running_var)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
