"""The contract of micro-batches: running statistics move once per mini-batch, as they would without micro-batches.

The schedules are those of GPipe (all forward passes first) and PipeDream (one forward, one backward), with and without
recomputation.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import client
from programs import contract_micro_batch_programs as programs
from programs.contract_micro_batch_programs import CHECKPOINTS, SCHEDULES, SHARES
from support.comparison import assert_close


def samples(number: int) -> torch.Tensor:
    """Each sample has another mean, so that the statistics of a part differ clearly from the whole's."""
    x = torch.randn(number, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return x + torch.arange(number).unsqueeze(1)


def plain(**options) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(3, dtype=torch.float64, **options)


def deferring(chunks: int, **options) -> client.SynchronizedBatchNorm1d:
    return client.convert_model(plain(**options), chunks=chunks)


def assert_same_buffers(layer: nn.Module, expected: nn.Module) -> None:
    assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_in_any_schedule_equal_one_process(ranks, schedule, reentrant, either):
    """Compares outputs, gradients, and the statistics after each mini-batch; several micro-batches overlap."""
    found = ranks(2, programs.by_schedule, schedule, reentrant, either)
    whole = programs.in_one_process()
    for rank, seen in enumerate(found):
        assert_close(seen, {name: _own(name, value, rank) for name, value in whole.items()})
    for name in whole:
        if " after " in name:
            assert torch.equal(found[0][name], found[1][name]), name


def _own(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
    if not name.startswith(("output", "input gradient")):
        return value
    return value.split(SHARES[int(name[-1])])[rank]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("chunks", [2, 4])
def test_the_statistics_move_with_the_last_micro_batch_and_count_one_mini_batch(chunks, momentum):
    expected, layer = plain(momentum=momentum), deferring(chunks, momentum=momentum)
    for x in (samples(8), samples(8) * 2):
        before = copy.deepcopy(expected)
        for part in x.chunk(chunks):
            assert_same_buffers(layer, before)
            torch.testing.assert_close(layer(part), copy.deepcopy(before)(part), rtol=1e-10, atol=1e-10)
        expected(x)
        assert_same_buffers(layer, expected)
    assert layer.num_batches_tracked == 2


def test_a_mini_batch_of_fewer_micro_batches_ends_with_a_commit():
    """9 samples in 4 chunks are 3 micro-batches."""
    expected, model = plain(), nn.Sequential(deferring(4))
    for x in (samples(9), samples(9) * 2):
        for part in x.chunk(4):
            model(part)
        client.commit_running_statistics(model)
        expected(x)
        assert_same_buffers(model[0], expected)
    client.commit_running_statistics(model)
    assert_same_buffers(model[0], expected)


def test_the_end_of_a_pass_in_join_ends_the_mini_batch():
    expected, layer = plain(), deferring(4)
    with client.join(layer):
        for part in samples(9).chunk(4):
            layer(part)
    expected(samples(9))
    assert_same_buffers(layer, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_not_counted(reentrant):
    expected, layer = plain(), deferring(3)
    for part in samples(9).chunk(3):
        checkpoint(layer, part.requires_grad_(), use_reentrant=reentrant).pow(3).sum().backward()
    expected(samples(9))
    assert_same_buffers(layer, expected)


def test_pending_micro_batches_are_no_state():
    layer = deferring(2)
    assert layer.state_dict().keys() == plain().state_dict().keys()
    layer(samples(4))
    twin = copy.deepcopy(layer)
    client.commit_running_statistics(twin)
    assert_same_buffers(twin, plain())
    layer.load_state_dict(plain().state_dict())
    client.commit_running_statistics(layer)
    assert_same_buffers(layer, plain())


def test_evaluation_between_micro_batches_is_not_counted():
    expected, layer = plain(), deferring(2)
    expected(samples(8))
    for part in samples(8).chunk(2):
        layer.train()(part)
        layer.eval()(part)
    assert_same_buffers(layer, expected)


@pytest.mark.parametrize(
    "layer",
    [
        client.SynchronizedBatchNorm1d(3, dtype=torch.float64, chunks=2),
        client.LazySynchronizedBatchNorm1d(dtype=torch.float64, chunks=2),
    ],
    ids=["ordinary", "lazy"],
)
def test_layers_made_by_hand_take_chunks(layer):
    expected = plain()
    for part in samples(8).chunk(2):
        layer(part)
    expected(samples(8))
    assert_same_buffers(layer, expected)


def test_a_model_that_is_converted_again_has_as_many_chunks_until_it_is_given_others():
    model = nn.Sequential(deferring(4))
    for options, chunks in (({}, 4), ({"chunks": 2}, 2)):
        assert client.convert_model(model, **options)[0].chunks == chunks
    with pytest.raises(ValueError, match="chunks: expected at least 1"):
        client.convert_model(model, chunks=0)
