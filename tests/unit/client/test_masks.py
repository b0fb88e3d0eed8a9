"""Masks: statistics over the unmasked positions, and Keras's treatment of the others."""

import itertools

import pytest
import torch
from torch import nn

import client
from statsd_bn.text import unwrap
from support import shards
from support.sentences import says
from support.shards import Shards, assert_equal, everywhere, on_the_whole_batch, packed

# Kinds of input, each with a kind of mask that fits it.
FITTING = [("1d of (N, C)", "some"), ("1d of (N, C, L)", "lengths"), ("2d", "sizes"), ("2d", "some"), ("3d", "some")]
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2.0**-7}  # bfloat16: one unit in the last place
BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize(("kind", "mask"), FITTING)
def test_masked_shards_equal_batch_norm_over_the_packed_positions(members, kind, mask):
    """Shards with a mask, without one, and empty. Torch's bfloat16 gradients are inexact; float64 is the reference."""
    ways = [((3, 4, 2), (mask,) * 3), ((3, 4, 2), (mask, "absent", "all")), ((3, 0, 2), (mask,) * 3)]
    cases = [Shards(kind, sizes, dtype, masks=masks) for sizes, masks in ways for dtype in TOLERANCE]
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        computed_in = torch.float64 if case.dtype == "bfloat16" else None
        seen, expected = packed(found, case).named(), on_the_whole_batch(case, computed_in).named()
        expected = {name: value.to(seen[name].dtype) for name, value in expected.items()}
        assert_equal(seen, expected, TOLERANCE[case.dtype])


@pytest.mark.parametrize("layouts", [("channels_last", "contiguous"), ("channels first", "every other")])
def test_masked_shards_may_be_channels_last_or_views(members, layouts):
    cases = [Shards(kind, (3, 2), layouts=layouts, masks=("some", "some")) for kind in ("2d", "3d")]
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        assert_equal(packed(found, case).named(), on_the_whole_batch(case).named(), 1e-10)


@pytest.mark.parametrize(("kind", "mask"), FITTING)
def test_masked_positions_are_normalised_and_their_gradients_follow_the_chain_rule(members, kind, mask):
    cases = [
        Shards(kind, (3, 4, 2), masks=masks, loss_at_masked=True) for masks in [(mask,) * 3, (mask, "none", "all")]
    ]
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        expected = shards.by_formula(case)
        hidden = torch.cat([~shard.counted.flatten() for shard in case.shards()])
        assert hidden.any()
        assert not hidden.all()
        buffers = on_the_whole_batch(case).buffers
        assert_equal(found.named(), expected.named() | buffers, 1e-10)


@pytest.mark.parametrize("masks", [way for way in itertools.product(("some", "none"), repeat=3) if "some" in way])
def test_all_positions_of_some_replicas_may_be_masked(members, masks):
    cases = [Shards(kind, (3, 4, 3), masks=masks) for kind in ("1d of (N, C)", "2d")]
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        assert_equal(packed(found, case).named(), on_the_whole_batch(case).named(), 1e-10)


def test_fewer_than_two_unmasked_values_are_refused_on_every_member(members):
    cases = [
        Shards("2d", (2, 1, 3), masks=("none",) * 3),
        Shards("1d of (N, C)", (1, 2, 2), masks=("some", "none", "none")),
    ]
    for results in members(3, shards.refused, cases):
        assert [is_intact for _, is_intact in results] == [True, True]
        for count, (error, _) in enumerate(results):
            expected = (
                f"layer 'bn': expected more than 1 value per channel over all replicas when training, got {count} "
            )
            assert unwrap(error).startswith(expected)
    for case in cases:
        with pytest.raises(ValueError, match="expected more than 1 value per channel over all replicas"):
            shards.as_virtual_replicas(case)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_padding_values_do_not_spread(members, bad, dtype):
    ways = [("2d", ("sizes", "some", "none")), ("1d of (N, C, L)", ("lengths", "absent", "some"))]
    for kind, masks in ways:
        case, clean = (Shards(kind, (3, 4, 2), dtype, masks=masks, padding=padding) for padding in (bad, 7.0))
        (found,) = everywhere(members, [case])
        found = packed(found, case).named()
        assert all(value.isfinite().all() for value in found.values())
        shards.assert_same_bits(found, packed(shards.as_virtual_replicas(clean), clean).named())


def test_padding_values_do_not_spread_into_second_gradients():
    def run(padding):
        case = Shards("2d", (3,), masks=("sizes",), padding=padding)
        (shard,), layer = case.shards(), case.layer(synchronised=True)
        loss = layer(shard.x, shard.mask).movedim(1, -1)[shard.mask].tanh().square().sum()
        (gradient,) = torch.autograd.grad(loss, shard.leaf, create_graph=True)
        gradient.square().sum().backward()
        return {"leaf": shard.leaf.grad, "weight": layer.weight.grad}

    shards.assert_same_bits(run(float("nan")), run(1.0))


@pytest.mark.parametrize(("kind", "mask"), FITTING)
def test_a_layer_alone_takes_masks_too(kind, mask):
    case = Shards(kind, (6,), masks=(mask,))
    (shard,), layer = case.shards(), case.layer(synchronised=True)
    output = layer(shard.x, shard.mask)
    (output * shard.factors).sum().backward()
    found = {"output": shard.pick(output), "input": shard.leaf.grad}
    expected = on_the_whole_batch(case)
    found |= {f"{name} gradient": parameter.grad for name, parameter in layer.named_parameters()}
    found |= dict(layer.named_buffers())
    wanted = {"output": expected.outputs[0], "input": expected.leaves[0]}
    wanted |= {f"{name} gradient": value for name, value in expected.parameters.items()} | expected.buffers
    assert_equal(found, wanted, 1e-10)


def test_data_parallel_splits_the_mask_with_the_input():
    case = Shards("2d", (5, 3), masks=("some", "some"))
    x, mask = (torch.cat(parts) for parts in zip(*((shard.x, shard.mask) for shard in case.shards()), strict=True))
    expected = on_the_whole_batch(case)
    for arguments, keywords in (((mask,), {}), ((), {"mask": mask})):
        layer = case.layer(synchronised=True)
        output = client.DataParallelWithCallback(layer, ["cpu"] * 3)(x, *arguments, **keywords)
        torch.testing.assert_close(output.movedim(1, -1)[mask], torch.cat(expected.outputs), rtol=1e-10, atol=1e-10)
        assert_equal(dict(layer.named_buffers()), expected.buffers, 1e-10)


@pytest.mark.parametrize("kind", ["1d of (N, C)", "2d"])
def test_a_mask_of_all_positions_is_no_mask(members, kind):
    with_mask, without = Shards(kind, (3, 4, 2), masks=("all",) * 3), Shards(kind, (3, 4, 2))
    found, expected = everywhere(members, [with_mask, without])
    assert_equal(found.named(), expected.named(), 1e-14)


def test_a_mask_is_harmless_in_eval():
    case = Shards("2d", (3,), masks=("some",))
    (shard,), layer = case.shards(), case.layer(synchronised=True).eval()
    assert torch.equal(layer(shard.x, shard.mask), layer(shard.x))
    assert torch.equal(layer(shard.x, torch.zeros_like(shard.mask)), case.layer(synchronised=False).eval()(shard.x))


def test_eval_without_running_statistics_uses_those_of_its_own_masked_batch():
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(4) < torch.tensor([[1], [4], [2], [3], [4], [2]])
    layer = client.SynchronizedBatchNorm1d(3, track_running_stats=False).eval()
    found = client.DataParallelWithCallback(layer, ["cpu"] * 2)(x, mask)
    for half in (slice(3), slice(3, 6)):
        values = x[half].movedim(1, -1)[mask[half]]
        expected = nn.BatchNorm1d(3, track_running_stats=False).eval()(values)
        torch.testing.assert_close(found[half].movedim(1, -1)[mask[half]], expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 4), TypeError, r"'stem.bn': expected a boolean mask, got torch.float32"),
        (torch.ones(2, 4, dtype=torch.uint8), TypeError, r"expected a boolean mask, got torch.uint8"),
        (torch.ones(2, 3, 4).bool(), ValueError, r"'stem.bn': expected a mask of shape \(2, 4\) .* got \(2, 3, 4\)"),
        (torch.ones(2).bool(), ValueError, r"expected a mask of shape \(2, 4\) .* got \(2,\)"),
        (torch.ones(1, 4).bool(), ValueError, r"expected a mask of shape \(2, 4\) .* got \(1, 4\)"),
        (torch.ones(2, 4, device="meta").bool(), ValueError, r"on cpu, .* got \(2, 4\) on meta"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(mask, error, message, training):
    layer = client.SynchronizedBatchNorm1d(3).train(training)
    layer.layer_name = "stem.bn"
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(error, check=says(message)):
        layer(torch.ones(2, 3, 4), mask)
    shards.assert_same_bits(layer.state_dict(), before)
