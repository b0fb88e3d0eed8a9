"""Replication: the callbacks of Synchronized-BatchNorm-PyTorch, and virtual replicas that behave as torch's."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import client
from client import DataParallelWithCallback
from client.data_parallel import any_device
from statsd_bn.errors import ConfigurationError, RoundMismatch
from support.sentences import says


class Recorder(nn.Module):
    calls = []

    def __data_parallel_replicate__(self, context, copy_id):
        self.calls.append((context, copy_id))

    def forward(self, x):
        return x


@pytest.fixture
def calls():
    Recorder.calls.clear()
    return Recorder.calls


def of_layer(network):
    network[1].compile(backend="eager")
    return network


def of_forward(network):
    network[1].forward = torch.compile(network[1].forward, backend="eager")
    return network


def wrapping_all(network):
    return torch.compile(network, backend="eager")


@pytest.mark.parametrize(("compiled", "named"), [(of_layer, "'1'"), (wrapping_all, "the model"), (of_forward, "'1'")])
def test_a_compiled_part_with_synchronised_layers_is_refused_in_training(compiled, named):
    network = compiled(nn.Sequential(nn.Linear(2, 4), client.SynchronizedBatchNorm1d(4)))
    with pytest.raises(ConfigurationError, match=f"{named} is compiled"):
        DataParallelWithCallback(network, ["cpu"] * 2)(torch.ones(4, 2))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda model: torch.jit.trace(model, torch.ones(2, 3))])
def test_replicas_cannot_be_traced_in_their_threads(trace):
    with pytest.raises(TypeError, check=says("cannot record the threads of its replicas; trace its module")):
        trace(DataParallelWithCallback(nn.Linear(3, 3), ["cpu"] * 2))


def test_a_compiled_part_without_synchronised_layers_has_replicas():
    x, results = torch.randn(6, 2), []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 4), client.SynchronizedBatchNorm1d(4))
        if is_compiled:
            network[0].compile(backend="eager")
        results.append(DataParallelWithCallback(network, ["cpu"] * 2)(x))
    torch.testing.assert_close(*results)


def test_patching_again_calls_back_no_more_often(calls):
    wrapped = DataParallelWithCallback(nn.Sequential(Recorder()), ["cpu"] * 2)
    client.patch_replication_callback(wrapped)
    wrapped(torch.ones(2, 2))
    assert [copy_id for _, copy_id in calls] == [0, 1]
    plain = nn.DataParallel(nn.Sequential(Recorder()))
    client.patch_replication_callback(plain)
    once = plain.replicate
    client.patch_replication_callback(plain)
    assert plain.replicate is once


class Raiser(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if x[0, 0] == 2:
            raise self.error
        return x


def test_an_exception_in_one_replica_is_the_one_raised_and_frees_its_siblings():
    model = nn.Sequential(Raiser(MemoryError("too large")), client.SynchronizedBatchNorm1d(1))
    wrapped = DataParallelWithCallback(model, ["cpu"] * 4)
    others = threading.active_count()
    with pytest.raises(MemoryError, match="too large") as caught:
        wrapped(torch.arange(4.0).view(4, 1))
    assert caught.value.__notes__ == ["in replica 2 on cpu"]
    assert threading.active_count() <= others + 4, "no thread is left behind except the kept ones"
    assert wrapped(torch.arange(4.0, 8.0).view(4, 1)).shape == (4, 1)


class Skipper(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = client.SynchronizedBatchNorm1d(1)

    def forward(self, x):
        return x if x[0, 0] == 2 else self.bn(x)


def test_a_layer_skipped_in_one_replica_is_reported_at_once():
    wrapped = DataParallelWithCallback(client.convert_model(Skipper()), ["cpu"] * 3)
    with pytest.raises(RoundMismatch, match="replica 2 has finished its forward pass"):
        wrapped(torch.arange(3.0).view(3, 1))


class GradModes(nn.Module):
    """A replica runs the layer within `without()` unless `grad` is true; replicas in `last` reach the layer last."""

    def __init__(self, last, without):
        super().__init__()
        self.bn = client.SynchronizedBatchNorm1d(1)
        self.last = last
        self.without = without
        self.others_are_there = threading.Event()

    def forward(self, x, number, grad):
        if number.item() in self.last:
            assert self.others_are_there.wait(10)
        else:
            self.others_are_there.set()
        with nullcontext() if grad else self.without():
            return self.bn(x)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("last", [{0}, {1}])
def test_each_replica_has_gradients_or_not_by_its_own_mode_whoever_comes_last(last, without):
    model = GradModes(last, without)
    wrapped = DataParallelWithCallback(model, ["cpu"] * 2)
    x = torch.randn(4, 1, requires_grad=True)
    whole = x.detach().clone().requires_grad_()
    factors = torch.randn(4, 1)
    (wrapped(x, torch.arange(2), torch.tensor([True, False])) * factors).sum().backward()
    (nn.BatchNorm1d(1)(torch.cat([whole[:2], whole[2:].detach()]))[:2] * factors[:2]).sum().backward()
    torch.testing.assert_close(x.grad, whole.grad)
    torch.testing.assert_close(model.bn.bias.grad, factors[:2].sum(0))


def test_the_weights_of_a_recurrent_layer_are_on_the_device_of_its_replica():
    devices = [torch.device("cpu"), torch.device("meta")]
    for device, replica in zip(devices, any_device.replicate(nn.LSTM(3, 4), devices), strict=True):
        assert {weight.device for weight in replica._flat_weights} == {device}
        assert replica._flat_weights[0] is replica.weight_ih_l0


def test_the_module_itself_is_never_a_replica():
    layer = client.SynchronizedBatchNorm1d(2)
    DataParallelWithCallback(layer, ["cpu"] * 3)(torch.randn(6, 2))
    assert "_replica" not in vars(layer)


def test_replicas_of_replicas_are_refused_in_training():
    layer = client.SynchronizedBatchNorm1d(2)
    nested = DataParallelWithCallback(DataParallelWithCallback(nn.Sequential(layer), ["cpu"] * 2), ["cpu"] * 2)
    x = torch.randn(8, 2)
    with pytest.raises(ConfigurationError, match=f"nested DataParallelWithCallback around layer '{layer.layer_name}'"):
        nested(x)
    torch.testing.assert_close(nested.eval()(x), layer(x))


def test_a_weight_that_changes_before_backward_is_an_error_as_with_torchs_layer():
    wrapped = DataParallelWithCallback(client.SynchronizedBatchNorm1d(2), ["cpu"] * 2)
    outputs = wrapped(torch.randn(8, 2, requires_grad=True))
    with torch.no_grad():
        wrapped.module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.square().sum().backward()


class Spoiler(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = client.SynchronizedBatchNorm1d(2)

    def forward(self, x, is_spoilt):
        x = x * 1
        output = self.bn(x)
        if is_spoilt:
            x.mul_(2)
        return output


@pytest.mark.parametrize("spoilt", range(2))
def test_an_input_that_changes_before_backward_is_an_error_as_with_torchs_layer(spoilt):
    wrapped = DataParallelWithCallback(Spoiler(), ["cpu"] * 2)
    outputs = wrapped(torch.randn(8, 2, requires_grad=True), torch.arange(2) == spoilt)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.square().sum().backward()


def test_one_device_runs_the_module_itself(calls):
    wrapped = DataParallelWithCallback(nn.Sequential(Recorder()), ["cpu"])
    assert wrapped(torch.ones(3, 2)).shape == (3, 2)
    assert calls == []


@pytest.mark.parametrize("device_ids", [None, pytest.param([0, 1], id="numbers")])
def test_without_accelerators_the_wrapper_runs_the_module_itself_as_torchs_does(monkeypatch, device_ids):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    wrapped = DataParallelWithCallback(nn.Linear(2, 2), device_ids)
    assert wrapped(torch.ones(3, 2)).shape == (3, 2)


def test_a_module_on_another_device_is_refused_as_in_torch():
    wrapped = DataParallelWithCallback(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device cpu"):
        wrapped(torch.ones(3, 2))
