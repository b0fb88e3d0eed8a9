"""Triton's kernels: on a GPU, or in Triton's interpreter if TRITON_INTERPRET is 1.

The interpreter needs a process that has not imported Triton: `tests/devices/test_triton_interpreter.py` starts one.
"""

import importlib
import logging
import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from gpu_report import reference
from torch import distributed
from torch.utils.checkpoint import checkpoint

import client
from client.nn import batchnorm, running_stats
from client.ops.checkpointing import exchange_cache
from client.ops.device_errors import NOT_FINITE, OTHER_ROUND, TOO_FEW, async_checks
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running
from client.ops.triton import exchange as triton_exchange
from client.ops.triton.exchange import TritonExchange
from client.transports import device_rows, process_group
from statsd_bn.errors import NonFinite, RoundMismatch
from support.cuda_stand_ins import as_on_cuda

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
# The interpreter truncates bfloat16, and a GPU rounds it.
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not IS_INTERPRETED)

pytestmark = (
    []
    if IS_INTERPRETED
    else [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture(autouse=True)
def _group_of_one(monkeypatch):
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(batchnorm, "communicator_for", lambda _: process_group.named(distributed.group.WORLD))
    torch.manual_seed(0)
    with as_on_cuda(DEVICE):
        yield
    distributed.destroy_process_group()


@pytest.fixture
def launch():
    """The module that launches the kernels."""
    return triton_exchange


@pytest.fixture
def _fused_as_on_cuda(monkeypatch):
    """Makes the interpreter round a fused multiply-add once; before Triton 3.9 it rounds the product too."""
    if IS_INTERPRETED:
        interpreter = importlib.import_module("triton.runtime.interpreter")

        def fused(_, x, y, z):
            found = x.data.astype("float64") * y.data + z.data
            return interpreter.TensorHandle(found.astype(z.data.dtype), z.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)


@pytest.fixture(params=["one split", "many splits"])
def _splits(request, monkeypatch, launch):
    launch._tiling.cache_clear()
    if request.param == "many splits":
        monkeypatch.setattr(launch, "TILE", 256)
    yield
    launch._tiling.cache_clear()


@contextmanager
def kernels(*, are_used=True):
    """Lets Triton's kernels serve all inputs of supported types, or no input; yields the exchanges with kernels."""
    made, normalise = [], TritonExchange.normalise

    def noted(exchange, *given):
        made.append(exchange)
        return normalise(exchange, *given)

    with ExitStack() as stack:
        supports = (lambda x, *_: x.dtype in triton_exchange.TYPES) if are_used else lambda *_: False
        stack.enter_context(mock.patch.object(triton_exchange, "supports", supports))
        stack.enter_context(mock.patch.object(TritonExchange, "normalise", noted))
        yield made


def layer_of(channels, **options):
    layer = client.SynchronizedBatchNorm1d(channels, **options)
    layer.layer_name = "bn"
    with torch.no_grad():
        for parameter, ends in zip(layer.parameters(), ((-1.5, 2.0), (1.0, -1.0)), strict=False):
            parameter.copy_(torch.linspace(*ends, channels))
    return layer.to(DEVICE)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, dtype) for layout in ("contiguous", "channels_last", "2-D") for dtype in TYPES),
        # The kernels get a dense copy of tensors in the next two layouts, so one type suffices.
        *((layout, torch.float32) for layout in ("contiguous gradient", "with gaps")),
    ],
)
@pytest.mark.usefixtures("_splits")
def test_results_are_within_the_bounds_of_the_reference(layout, dtype):
    shape = (150, 3) if layout == "2-D" else (6, 3, 5, 10)
    x, grad = ((torch.randn(shape) * 2 + 3).to(dtype).to(DEVICE) for _ in range(2))
    if layout in {"channels_last", "contiguous gradient"}:
        x = x.to(memory_format=torch.channels_last)
    if layout == "channels_last":
        grad = grad.to(memory_format=torch.channels_last)
    if layout == "with gaps":
        x = x.repeat_interleave(2, 3)[..., ::2]
    layer = layer_of(3)
    layer._check_input_dim = lambda _: None
    leaf = x.detach().requires_grad_()
    with kernels() as made:
        output = layer(leaf)
        output.backward(grad)
    assert len(made) == 1
    found = {"output": output.detach(), "input gradient": leaf.grad}
    found |= {f"{name} gradient": each.grad for name, each in layer.named_parameters()}
    found |= {"running mean": layer.running_mean, "running variance": layer.running_var}
    reference.distances(found, reference.expected(x, grad, layer.weight.detach(), layer.bias.detach()))
    assert int(layer.num_batches_tracked) == 1


def rows_of(ranks, channels):
    """Rows as ranks send them, with a digest of 5."""
    mean, deviation = torch.randn(2, ranks, channels, dtype=torch.float64)
    count = torch.arange(2, 2 + ranks, dtype=torch.float64).unsqueeze(1)
    digests = torch.full((ranks, 1), 5).view(torch.float64)
    return torch.cat((digests, count, count * mean, count * (mean * mean + deviation * deviation)), 1).to(DEVICE)


def finished(launch, rows, running, channels, **options):
    """The forward pass of a rank that has gathered these rows."""
    x = torch.zeros(1, channels, device=DEVICE)
    found = launch.Pass(x, len(rows), gathers=True)
    found.rows.copy_(rows.flatten())
    found.digest = 5
    found.finish(None, None, running, 1e-5, **options)
    return found


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16][: 2 if IS_INTERPRETED else 3])
@pytest.mark.usefixtures("_fused_as_on_cuda")
def test_ranks_with_and_without_kernels_have_the_same_bits(launch, dtype, clamp):
    rows = rows_of(3, 300)
    ours, torchs = (client.SynchronizedBatchNorm1d(300, dtype=dtype).to(DEVICE) for _ in range(2))
    found = finished(
        launch, rows, Running(ours.running_mean, ours.running_var, ours.num_batches_tracked, 0.1), 300, clamp=clamp
    )
    moments = ChannelMoments(*device_rows.sum_rows(rows[:, 1:], (2, 300)))
    running_stats.update_from(torchs, moments)
    expected = ChannelStatistics.of(moments, 1e-5, "clamp" if clamp else "plus")
    assert torch.equal(found.statistics, expected.vectors)
    assert reference.has_equal_bits(dict(ours.named_buffers()), dict(torchs.named_buffers()))


def other_digest(rows):
    rows[1, 0] = 0.0


def infinite(rows):
    rows[1, 2 + 299] = torch.inf


def single(rows):
    rows[:, 1] = torch.tensor([0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("spoil", "flags", "fails"),
    [
        (other_digest, [0, OTHER_ROUND, 0, 0], True),
        (infinite, [0, NOT_FINITE, 0, 0], False),
        (single, [0, 0, 0, TOO_FEW], True),
    ],
)
def test_errors_of_a_round_are_flagged(launch, spoil, flags, fails):
    rows = rows_of(3, 300)
    spoil(rows)
    layer = client.SynchronizedBatchNorm1d(300).to(DEVICE)
    found = finished(
        launch, rows, Running(layer.running_mean, layer.running_var, layer.num_batches_tracked, 0.1), 300, clamp=False
    )
    assert found.flags.view(4, -1).amax(1).tolist() == flags
    assert bool(found.statistics[0].isnan().all()) == fails
    assert int(layer.num_batches_tracked) == (not fails)
    assert bool(layer.running_mean.any()) != fails


def called(layer, x):
    output = layer(x)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    async_checks.poll(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))
    return output


def test_ranks_in_other_rounds_are_reported(monkeypatch):
    gather = device_rows._all_gather

    def other(rows, row, group):
        gather(rows, row, group=group)
        rows.view(torch.int64)[0] += 1

    layer = layer_of(4)
    monkeypatch.setattr(device_rows, "_all_gather", other)
    with kernels(), pytest.raises(RoundMismatch, match=r"rank 0 +in another round"):
        called(layer, torch.randn(6, 4, device=DEVICE))


def test_too_few_values_and_values_that_are_not_finite_are_reported(caplog):
    with kernels(), caplog.at_level(logging.INFO, "statsd_bn.client"):
        with pytest.raises(ValueError, match=r"got 1 .*shape \(1, 4\)"):
            called(layer_of(4), torch.randn(1, 4, device=DEVICE))
        x = torch.randn(6, 4, device=DEVICE)
        x[2, 3] = torch.inf
        output = called(layer_of(4), x)
    assert "first non-finite: layer 'bn', forward" in caplog.text
    assert output[:, :3].isfinite().all()


def test_a_refused_batch_changes_no_running_statistics(monkeypatch):
    monkeypatch.setenv("STATSD_BN_ON_NONFINITE", "raise")
    layer, x = layer_of(4), torch.full((6, 4), torch.inf, device=DEVICE)
    with kernels(), pytest.raises(NonFinite):
        layer(x)
    assert reference.has_equal_bits(dict(layer.named_buffers()), dict(layer_of(4).named_buffers()))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_tensors_of_another_length_are_refused(name):
    layer = layer_of(4)
    getattr(layer, name).data = torch.ones(3, device=DEVICE)
    with (
        kernels(),
        pytest.raises(
            (RuntimeError, ValueError),
            match=r"size of tensor a \(\d\) must|expected a (weight|bias) of shape \(4,\), got \(3,\)",
        ),
    ):
        layer(torch.randn(6, 4, device=DEVICE))


def test_an_unchecked_round_keeps_no_call_alive():
    with kernels() as made, mock.patch.object(async_checks, "submit"):
        layer_of(4)(torch.randn(6, 4, device=DEVICE, requires_grad=True))
        made.clear()
        assert not exchange_cache._with_graph["bn"]


def test_a_call_keeps_no_rows_of_other_ranks():
    with kernels() as made:
        layer_of(4)(torch.randn(6, 4, device=DEVICE))
    forward_pass = made[0].first
    assert not hasattr(forward_pass, "rows")
    assert forward_pass.work.untyped_storage().nbytes() == 8 * (1 + 6 * 4 + 2 + 2 * 4)


@pytest.mark.parametrize("shape", [(2**31, 1), (1, 2**16, 128)])
def test_the_kernels_refuse_inputs_that_need_more_programs_than_cuda_can_launch(launch, shape):
    assert not launch.fits(torch.empty(shape, device="meta"))


def checkpointed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def twice(layer, x):
    return layer(layer(x).tanh())


def retained(layer, x):
    output = layer(x)
    (output**2).sum().backward(retain_graph=True)
    return output


def penalised(layer, x):
    output = layer(x)
    (gradient,) = torch.autograd.grad((output**3).sum(), x, create_graph=True)
    return output + gradient


def without_grad(layer, x):
    with torch.no_grad():
        layer(x)
    return layer(x)


def frozen(layer, x):
    for parameter in layer.parameters():
        parameter.requires_grad_(requires_grad=False)
    return layer(x)


def detached(layer, x):
    return layer(x.detach()) + x


def empty(layer, x):
    return layer(x[:0]).sum() + layer(x)


def offloaded(layer, x):
    """With hooks that lose the layout of saved tensors, like `save_on_cpu`."""
    layer._check_input_dim = lambda _: None
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda saved: saved):
        return layer(x.unsqueeze(3).contiguous(memory_format=torch.channels_last)).squeeze(3)


RUNS = [checkpointed, twice, retained, penalised, without_grad, frozen, detached, empty, offloaded]
OPTIONS = [{}, {"momentum": None}, {"chunks": 2}, {"affine": False}, {"track_running_stats": False}]


@pytest.mark.parametrize(
    ("run", "options"), [(run, {}) for run in RUNS] + [(checkpointed, options) for options in OPTIONS[1:]]
)
def test_results_are_those_of_torchs_operators(run, options):
    found = []
    x = torch.randn(6, 4, 5, device=DEVICE)
    for are_used in (True, False):
        layer, leaf = layer_of(4, **options), x.clone().requires_grad_()
        with kernels(are_used=are_used) as made:
            for _ in range(2):
                output = run(layer, leaf)
                (output * output.detach().cumsum(0)).sum().backward()
        assert bool(made) == are_used
        state = {**dict(layer.named_buffers()), **{name: each.grad for name, each in layer.named_parameters()}}
        found.append({"output": output.detach(), "input": leaf.grad, **state})
    for name, value in found[0].items():
        torch.testing.assert_close(
            value, found[1][name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("samples", "launches"), [(6, [3, 3]), (6000, [4, 4])])
def test_number_of_launched_kernels(launch, samples, launches):
    layer, x, found = layer_of(4), torch.randn(samples, 4, device=DEVICE, requires_grad=True), []
    with kernels(), mock.patch.object(launch, "_launch", wraps=launch._launch) as launched:
        output = layer(x)
        found.append(launched.call_count)
        output.sum().backward()
        found.append(launched.call_count - found[0])
    assert found == launches


@pytest.mark.parametrize(
    ("wrong", "reason"), [("no type", "RuntimeError: no such type"), ("version", "Triton 3.4 or newer, got 3.2.0")]
)
def test_without_triton_torchs_operators_compute(launch, monkeypatch, caplog, wrong, reason):
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    triton_exchange.works_on.cache_clear()
    assert triton_exchange.works_on(device, torch.float32)
    if wrong == "no type":
        monkeypatch.setattr(launch.Pass, "finish_backward", mock.Mock(side_effect=RuntimeError("no such type")))
    else:
        monkeypatch.setattr(importlib.import_module("triton"), "__version__", "3.2.0")
    for _ in range(2):
        assert not triton_exchange.works_on(device, torch.float16)
    triton_exchange.works_on.cache_clear()
    assert caplog.text.count(f"Triton failed for torch.float16 on {device}") == caplog.text.count(reason) == 1
