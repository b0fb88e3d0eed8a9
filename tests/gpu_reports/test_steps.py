"""Parts of the GPU report's steps: bounds, ranks, the stand-in for a graph, and code that only a GPU runs."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_report import rank_processes, reference
from gpu_report.rank_processes import RankFailed, on_ranks
from gpu_report.recorder import Recorder
from torch import nn
from torch.nn import functional

from support.no_host import HostLooks

CPU = torch.device("cpu")


def of_torch(x, grad, weight, bias, momentum=reference.MOMENTUM):
    x, weight, bias = (each.detach().clone().requires_grad_() for each in (x, weight, bias))
    mean, variance = torch.zeros(x.shape[1], dtype=weight.dtype), torch.ones(x.shape[1], dtype=weight.dtype)
    output = functional.batch_norm(x, mean, variance, weight, bias, training=True, momentum=momentum)
    output.backward(grad)
    found = {"output": output, "input gradient": x.grad, "weight gradient": weight.grad, "bias gradient": bias.grad}
    return {name: each.detach() for name, each in {**found, "running mean": mean, "running variance": variance}.items()}


def sample(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(6, 4, 5, generator=generator).to(dtype) for _ in range(2))
    return x, grad, torch.linspace(0.5, 2, 4), torch.linspace(-1, 1, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_own_batch_norm_is_within_the_bounds(dtype):
    given = sample(dtype)
    shares = reference.distances(of_torch(*given), reference.expected(*given))
    assert 0 < max(shares.values()) <= 1


SPOILT = {
    "an ulp of bfloat16": ("output", lambda value: value * (1 + 2**-7)),
    "float32's last digits": ("running variance", lambda value: value * (1 + 2e-6)),
    "NaN": ("input gradient", lambda value: value * torch.nan),
    "another type": ("output", lambda value: value.float()),
    "another shape": ("bias gradient", lambda value: value[:1]),
    "the biased variance": ("running variance", lambda value: value - 0.1 * (value - 0.9) / 30),
}


@pytest.mark.parametrize(("name", "spoil"), SPOILT.values(), ids=SPOILT)
def test_a_result_outside_of_its_bounds_is_named(name, spoil):
    given = sample(torch.bfloat16)
    found = of_torch(*given)
    found[name] = spoil(found[name])
    with pytest.raises(reference.TooFar, match=f"^{name}: ") as raised:
        reference.distances(found, reference.expected(*given))
    assert len(str(raised.value).splitlines()) == 1


def test_a_missing_result_is_named():
    given = sample()
    found = of_torch(*given)
    del found["bias gradient"]
    with pytest.raises(reference.TooFar, match="expected bias gradient, "):
        reference.distances(found, reference.expected(*given))


@pytest.mark.parametrize(
    "other", [torch.tensor([0.0, -0.0]), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)], ids=str
)
def test_bits_differ_if_the_type_the_shape_or_the_sign_of_a_zero_differs(other):
    assert reference.bits(torch.zeros(2)) == reference.bits(torch.zeros(2))
    assert reference.bits(other) != reference.bits(torch.zeros(2))


def answer(rank):
    return rank.number, rank.options["word"], os.environ["OF_RANK"]


def raise_in_second(rank):
    if rank.number == 1:
        raise ValueError("no such kernel")


def hang_in_second(rank):
    (rank.options["folder"] / str(rank.number)).write_text(str(os.getpid()))
    if rank.number == 1:
        time.sleep(600)


def die_in_second(rank):
    if rank.number == 1:
        os._exit(3)


@pytest.fixture
def step():
    return SimpleNamespace(device=CPU, plant="", stand_in=True)


@pytest.mark.processes
def test_ranks_return_what_their_program_returns(step):
    found = on_ranks(step, answer, 2, seconds=100, environments=[{"OF_RANK": "a"}, {"OF_RANK": "b"}], word="yes")
    assert found == [(0, "yes", "a"), (1, "yes", "b")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "error"), [(raise_in_second, "ValueError: no such kernel"), (die_in_second, "ended without a word")]
)
def test_a_rank_that_fails_is_named(step, program, error):
    with pytest.raises(RankFailed, match=r"^rank 1:") as raised:
        on_ranks(step, program, 2, seconds=100)
    assert error in str(raised.value)


@pytest.mark.processes
def test_a_rank_that_hangs_is_ended(step, tmp_path):
    on_ranks(step, hang_in_second, 1, seconds=100, folder=tmp_path)  # starts the fork server, outside the limit below
    with pytest.raises(RankFailed, match="rank 1: expected an answer in time, got none"):
        on_ranks(step, hang_in_second, 2, seconds=rank_processes.LAST_WORDS_SECONDS + 3, folder=tmp_path)
    for path in tmp_path.iterdir():
        assert not Path("/proc", path.read_text(), "fd").exists(), path.name


def test_a_recorder_replays_on_the_same_memory():
    x, seen = torch.ones(3), []
    layer = nn.BatchNorm1d(3)
    recorder = Recorder()
    with recorder:
        seen.append((x * 2).sum())
        layer(x.expand(4, 3) + 1)
    x.fill_(5)
    recorder.replay()
    assert seen[0] == 30
    assert layer.num_batches_tracked == 2


def test_a_read_of_a_tensor_within_a_recorder_raises():
    with pytest.raises(HostLooks), Recorder():
        float(torch.ones(1))
