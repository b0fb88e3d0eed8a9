"""Rows of one process's replicas, passed from device to device; the CPU represents the devices."""

from contextlib import nullcontext

import pytest
import torch

import client
from client.ops.statistics import ChannelStatistics
from statsd_bn.errors import ConfigurationError
from support.no_host import HostLooks, host_looks_at_nothing
from support.replicas_on_devices import OPTIONS, RUNS, Layered, exchanges_noted, masked, plain, training
from support.sentences import says
from support.transports import reference_kernels, rows_on_devices


@pytest.fixture
def made():
    with exchanges_noted() as found:
        yield found


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].numpy().tobytes() == value.numpy().tobytes(), name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("run", "penalty"), [*((run, False) for run in RUNS), (RUNS[0], True), (RUNS[-1], True)])
def test_replicas_give_the_same_bits_as_over_the_host(made, run, options, penalty):
    with reference_kernels():
        expected = training(run, options, penalty=penalty)
        assert not made
        with rows_on_devices():
            found = training(run, options, penalty=penalty)
    assert made
    assert_same_bits(found, expected)


def test_a_mini_batch_may_have_micro_batches_with_and_without_a_mask():
    """Without a mask a process that is alone runs torch's own layer."""
    first, second = torch.randn(2, 6, 4)
    found = []
    for where in (nullcontext, rows_on_devices):
        layer = client.SynchronizedBatchNorm1d(4, chunks=2)
        with where():
            layer(first)
            layer(second, torch.ones(6, dtype=torch.bool))
        found.append(dict(layer.named_buffers()))
    assert int(found[0]["num_batches_tracked"]) == 1
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=name)


def test_the_gradient_of_a_parameter_has_its_own_memory():
    """Changing it in place must not change the sums that a second derivative needs."""
    with rows_on_devices():
        model = client.SynchronizedBatchNorm1d(4, dtype=torch.float64)
        x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
        loss = (model(x, torch.ones(6, dtype=torch.bool)) ** 3).sum()
        by_weight, by_bias, by_input = torch.autograd.grad(loss, [*model.parameters(), x], create_graph=True)
        penalty = by_input.square().sum() + by_weight.sum()
        (expected,) = torch.autograd.grad(penalty, x, retain_graph=True)
        by_weight.data.zero_()
        by_bias.data.zero_()
        (found,) = torch.autograd.grad(penalty, x)
    assert torch.equal(found, expected)


def test_a_host_synchronisation_in_a_replica_would_be_detected(monkeypatch):
    of = ChannelStatistics.of
    monkeypatch.setattr(ChannelStatistics, "of", lambda *given: (of(*given), of(*given).mean[0].item())[0])
    with rows_on_devices(), pytest.raises(HostLooks, match=r"Tensor\.item"):
        training(plain, {}, host_looks_at_nothing)


def test_with_rows_on_the_host_host_synchronisations_are_detected():
    with pytest.raises(HostLooks):
        training(plain, {}, host_looks_at_nothing)


@pytest.mark.parametrize("counted", [0, 1])
def test_too_few_values_are_an_error(counted):
    wrapped = client.DataParallelWithCallback(Layered(masked), ["cpu"] * 2)
    x = torch.full((4, 4), -2.0)
    x[:counted, 0] = 0
    with rows_on_devices(), pytest.raises(ValueError, match="expected more than 1 value per channel"):
        wrapped(x)
    assert wrapped.module.bn.num_batches_tracked == 0


def test_another_input_during_a_backward_pass_is_no_recomputation():
    layer = client.SynchronizedBatchNorm1d(4)
    mask = torch.ones(6, dtype=torch.bool)
    x = torch.randn(6, 4, requires_grad=True)
    with rows_on_devices():
        output = layer(x, mask)
        output.register_hook(lambda _: layer(x.detach() + 1, mask))
        with pytest.raises(ConfigurationError, check=says("called during a backward pass with an input that no check")):
            output.square().sum().backward()
