"""Replicas of one process whose rows go from device to device; the CPU stands in for their devices.

Where there is CUDA, the same runs there, and torch itself says that nobody waits.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import client
from client.autograd.device_exchange import DeviceExchange
from client.kernels import streams
from client.kernels.device_statistics import DeviceStatistics
from client.lanes import named_process_group
from client.lanes.process_group import ProcessGroupPipe
from client.layers import batchnorm, call
from statsd_bn.errors import ConfigurationError
from support.lanes import elementwise_kernels, rows_on_devices
from support.no_host import HostLooks, host_looks_at_nothing
from support.sentences import says

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

REPLICAS = 3


class Layered(nn.Module):
    """A layer whose every replica does with it what a test wants, where `guard` says what it must not do."""

    def __init__(self, run, guard=nullcontext, **options):
        super().__init__()
        self.bn = client.SynchronizedBatchNorm1d(4, **options)
        self.bn.layer_name = "bn"
        self.run = run
        self.guard = guard

    def forward(self, x):
        with self.guard():
            return self.run(self.bn, x)


def plain(bn, x):
    return bn(x)


def masked(bn, x):
    return bn(x, x[:, 0] > -1)


def used_twice(bn, x):
    return bn(bn(x).tanh())


def checkpointed(bn, x):
    return checkpoint(bn, x, use_reentrant=False)


RUNS = [plain, masked, used_twice, checkpointed]
OPTIONS = {
    "usual": {},
    "float64": {"dtype": torch.float64},
    "cumulative average": {"momentum": None},
    "clamp": {"eps_mode": "clamp", "eps": 0.9},
    "micro-batches": {"chunks": 2},
    "without parameters": {"affine": False},
}


def training(run, options, guard=nullcontext, device="cpu", penalty=False):
    """Everything that three steps leave behind; the first one is not guarded."""
    torch.manual_seed(0)
    model = Layered(run, **options)
    wrapped = client.DataParallelWithCallback(model.to(device), [device] * REPLICAS)
    found = {}
    for step in range(3):
        x = torch.randn(7, 4, 5, dtype=options.get("dtype"), device=device, requires_grad=True)
        model.guard = guard if step else nullcontext
        with model.guard():
            output = wrapped(x)
            if penalty:
                (output,) = torch.autograd.grad((output**3).sum(), x, create_graph=True)
            (output * output.detach().cumsum(0)).sum().backward()
        found |= {f"output {step}": output.detach(), f"input {step}": x.grad}
    return found | dict(model.named_buffers()) | {name: each.grad for name, each in model.named_parameters()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].numpy().tobytes() == value.numpy().tobytes(), name


@pytest.fixture
def made(monkeypatch):
    """The exchanges on devices that are made."""
    found = []

    class Noted(DeviceExchange):
        def forward(self, local):
            found.append(self)
            super().forward(local)

    monkeypatch.setattr(call, "DeviceExchange", Noted)
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("penalty", [False, True], ids=["", "penalty"])
def test_replicas_give_the_same_bits_as_over_the_host(made, run, options, penalty):
    with elementwise_kernels():
        expected = training(run, options, penalty=penalty)
        assert not made
        with rows_on_devices():
            found = training(run, options, penalty=penalty)
    assert made
    assert_same_bits(found, expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("penalty", [False, True], ids=["", "penalty"])
def test_replicas_do_not_have_the_host_look_at_a_tensor(made, run, options, penalty):
    if run is checkpointed and "chunks" in options:
        pytest.skip("autograd keeps both calls")
    with rows_on_devices():
        training(run, options, host_looks_at_nothing, penalty=penalty)
    assert made


def test_a_mini_batch_may_have_micro_batches_with_and_without_a_mask():
    """Without one, and alone, the layer is torch's own."""
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


def test_a_parameters_gradient_has_memory_of_its_own():
    """Whoever changes it in place must not change the sums that a second derivative needs."""
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[CUDA, pytest.mark.cuda])])
@pytest.mark.parametrize("run", RUNS)
def test_a_rank_of_a_process_group_does_not_wait_for_its_device(made, monkeypatch, device, run):
    """A process group of one rank, which is enough to send all rounds through it."""
    backend = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(batchnorm, "company_in", lambda _: named_process_group.named(distributed.group.WORLD))
    try:
        with rows_on_devices() if device == "cpu" else nullcontext():
            model = Layered(run).to(device)
            for step in range(3):
                x = torch.randn(6, 4, 5, device=device, requires_grad=True)
                with (nobody_waits if device == "cuda" else host_looks_at_nothing)() if step else nullcontext():
                    model(x).square().sum().backward()
    finally:
        distributed.destroy_process_group()
    assert {type(exchange.lane) for exchange in made} == {ProcessGroupPipe}


def test_a_look_in_a_replica_would_be_seen(monkeypatch):
    of = DeviceStatistics.of
    monkeypatch.setattr(DeviceStatistics, "of", lambda *given: (of(*given), of(*given).mean[0].item())[0])
    with rows_on_devices(), pytest.raises(HostLooks, match=r"Tensor\.item"):
        training(plain, {}, host_looks_at_nothing)


def test_over_the_host_it_is_seen_that_the_host_looks():
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
    """The host tells two inputs of one shape apart by their sums, and a device a moment later."""
    layer = client.SynchronizedBatchNorm1d(4)
    mask = torch.ones(6, dtype=torch.bool)
    x = torch.randn(6, 4, requires_grad=True)
    with rows_on_devices():
        output = layer(x, mask)
        output.register_hook(lambda _: layer(x.detach() + 1, mask))
        with pytest.raises(ConfigurationError, check=says("expected a call during a backward pass to have the input")):
            output.square().sum().backward()


def test_replicas_compute_in_their_own_streams(monkeypatch):
    """Named by the replicas' inputs, since the CPU has none."""
    entered, seen = [], []

    @contextmanager
    def enter(names):
        entered.append(list(names))
        yield
        entered.pop()

    of = DeviceExchange.backward
    monkeypatch.setattr(streams, "current", lambda x: f"stream of {float(x.detach()[0, 0, 0]):.0f}")
    monkeypatch.setattr(streams, "entered", enter)
    monkeypatch.setattr(
        DeviceExchange, "forward", note(DeviceExchange.forward, lambda: seen.append(("forward", entered[-1])))
    )
    monkeypatch.setattr(DeviceExchange, "backward", note(of, lambda: seen.append(("backward", entered[-1]))))
    x = torch.randn(4, 4, 5)
    x[:, 0, 0] = torch.arange(4)
    with rows_on_devices():
        model = client.DataParallelWithCallback(client.SynchronizedBatchNorm1d(4), ["cpu"] * 2)
        model(x.requires_grad_()).square().sum().backward()
    both = ["stream of 0", "stream of 2"]
    assert seen == [("forward", both), ("backward", both)]


def note(function, say):
    def run(*given):
        say()
        return function(*given)

    return run


@contextmanager
def nobody_waits():
    """Torch raises from each call that would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@CUDA
@pytest.mark.cuda
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("run", RUNS)
def test_on_cuda_nobody_waits(run, options):
    found = training(run, options, nobody_waits, "cuda")
    expected = training(run, options)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)


@CUDA
@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_on_two_cuda_devices_replicas_equal_those_of_one():
    """The rows go from device to device, also while other streams than the default are in use."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, 5)
    results = []
    for devices in (["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]):
        model = client.SynchronizedBatchNorm1d(4).to("cuda:0")
        wrapped = client.DataParallelWithCallback(model, devices)
        side = [torch.cuda.Stream(device) for device in devices]
        with streams.entered(side):
            leaf = x.to("cuda:0").requires_grad_()
            output = wrapped(leaf)
            (output * output.detach().cumsum(0)).sum().backward()
        torch.cuda.synchronize()
        results.append([each.cpu() for each in (output, leaf.grad, model.running_mean, model.running_var)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
