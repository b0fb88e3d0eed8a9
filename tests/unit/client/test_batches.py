"""Batches of any shape: unequal, empty on some replicas, a single value on others, and very many values."""

import itertools

import numpy as np
import pytest
import torch

from client.ops import engine
from client.ops.exchange import Exchange
from client.ops.functional import Slice, batch_norm
from client.transports.transport import LocalPipe
from support.shards import MANY, MANY_VALUES, Shards, assert_equal, everywhere, on_the_whole_batch, with_many_values
from support.whole_batch import KINDS


def assert_all_equal_the_whole_batch(members, cases):
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        assert_equal(found.named(), on_the_whole_batch(case).named(), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_may_be_empty_in_any_order_and_number(members, kind):
    patterns = list(itertools.product((0, 1), repeat=3))
    cases = [Shards(kind, tuple(n * full for n, full in zip((3, 2, 4), pattern, strict=True))) for pattern in patterns]
    assert_all_equal_the_whole_batch(members, cases)


def test_a_shard_may_have_samples_without_positions():
    layer, x = torch.nn.BatchNorm1d(2), torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    slices = [Slice(part, layer.weight, layer.bias) for part in (x, x[..., :0])]
    slices[1].input.requires_grad_()
    outputs = batch_norm(slices, Exchange(LocalPipe("bn"), "bn", layer.eps, "plus"))
    torch.testing.assert_close(outputs[0], layer(x))
    assert outputs[1].shape == (4, 2, 0)
    torch.autograd.backward([(output * output).sum() for output in outputs])
    assert slices[1].input.grad.shape == (4, 2, 0)


def test_one_value_per_channel_on_a_replica_is_enough(members):
    """Some replicas have a single value per channel, or none, but the whole group has at least two."""
    sizes = [(1, 1, 1), (1, 3, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 2, 0)]
    assert_all_equal_the_whole_batch(members, [Shards("1d of (N, C)", split, seed=n) for n, split in enumerate(sizes)])


def test_counts_beyond_float32_stay_exact(members):
    """2^24 zeros and twos, and a 1 on the other member: a float32 count or a biased running variance errs by 2^-24."""
    found = members(2, with_many_values)
    values, factors = (torch.tensor([*shared, one], dtype=torch.float64) for shared, one in MANY_VALUES)
    times = torch.tensor([2.0**22] * 4 + [1], dtype=torch.float64)
    centred, invstd = values - 1, (2.0**24 / MANY + 1e-5) ** -0.5
    projected = centred * invstd**2 * (times * factors * centred).sum() / MANY
    gradient = times * invstd * (factors - (times * factors).sum() / MANY - projected)
    for (mean, variance, output, leaf), own in zip(found, (slice(4), slice(4, 5)), strict=True):
        np.testing.assert_allclose((mean, variance), 1.0, rtol=1e-12)
        np.testing.assert_allclose(output, centred[own] * invstd, rtol=1e-6)
        np.testing.assert_allclose(leaf, gradient[own], rtol=1e-5)


def test_a_mask_may_count_beyond_float32():
    x, mask = torch.tensor(3.0).expand(1, 1, MANY + 2), torch.ones(1, MANY + 2, dtype=torch.bool)
    mask[0, 5:7] = False
    found = engine.moments(x, mask)
    assert (found.count, found.vectors.tolist()) == (MANY, [[3.0 * MANY], [9.0 * MANY]])
