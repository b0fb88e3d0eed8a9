"""The micro-batches of a mini-batch move the statistics once, as `nn.BatchNorm` does for the whole mini-batch."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import client
from programs import deferred_programs
from programs.deferred_programs import batch

# Numbers of samples: a row per micro-batch, an entry per member.
SHARES = ((2, 1), (1, 3), (2, 2))
ONE_EMPTY = ((2, 1), (0, 3), (0, 0))

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
SHAPES = {"1d of (N, C)": (), "1d of (N, C, L)": (5,), "2d": (4, 3), "3d": (2, 3, 2)}
KINDS = {"1d of (N, C)": nn.BatchNorm1d, "1d of (N, C, L)": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}


def samples(number, kind="1d of (N, C)", dtype=torch.float64):
    x = torch.randn(number, 3, *SHAPES[kind], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x + torch.arange(number * 3).view(number, 3, *[1] * len(SHAPES[kind]))).to(dtype)


def layers(chunks, kind="1d of (N, C)", dtype=torch.float64, **options):
    plain = KINDS[kind](3, dtype=dtype, **options)
    return plain, client.convert_model(copy.deepcopy(plain), chunks=chunks)


def assert_equal(found, expected, tolerance=1e-12):
    """Compares the buffers of two modules; each may also be a dict, as `deferred_programs.buffers` returns it."""
    found, expected = (
        deferred_programs.buffers(each) if isinstance(each, nn.Module) else each for each in (found, expected)
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def check_moves_as_whole(plain, layer, parts, tolerance=1e-12):
    """Asserts that micro-batches move a layer as their union moves torch's layer."""
    plain(torch.cat(parts))
    for part in parts:
        layer(part)
    assert_equal(layer, plain, tolerance)


def unmoved(layer):
    return layer.num_batches_tracked == 0 and not layer.running_mean.any() and bool((layer.running_var == 1).all())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", SHAPES)
def test_unequal_micro_batches_move_the_statistics_as_the_whole_mini_batch(kind, dtype):
    plain, layer = layers(3, kind, dtype)
    for x in (samples(9, kind, dtype), samples(9, kind, dtype) * 2):
        check_moves_as_whole(plain, layer, x.split((2, 4, 3)), TOLERANCES[dtype])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_running_variance_is_unbiased(size):
    _, layer = layers(2, "1d of (N, C, L)", momentum=1.0)
    x = samples(size)
    for part in x.split((size // 2, size - size // 2)):
        layer(part.unsqueeze(2).expand(-1, -1, 2))
    twice = x.repeat(2, 1)
    torch.testing.assert_close(layer.running_var, twice.var(0, correction=1), rtol=1e-12, atol=1e-12)


def test_a_commit_with_nothing_pending_changes_nothing():
    plain, layer = layers(2)
    model = nn.Sequential(layer, nn.BatchNorm1d(3), client.SynchronizedBatchNorm1d(3))
    client.commit_running_statistics(model)
    assert unmoved(layer)
    x = samples(8)
    plain(x)
    for part in x.chunk(2):
        layer(part)
        layer.eval()(part)
        layer.train()
    for _ in range(2):
        client.commit_running_statistics(model)
    assert_equal(layer, plain)


@pytest.mark.parametrize("sizes", [SHARES, ONE_EMPTY], ids=["unequal", "empty"])
@pytest.mark.parametrize("missing", [0, 1])
def test_members_with_micro_batches_equal_the_whole_mini_batch(members, sizes, missing):
    """A mini-batch has as many micro-batches as `chunks`, or one fewer and then a commit."""
    plain, expected = nn.BatchNorm2d(1).double(), []
    for mini_batch in range(2):
        before = deferred_programs.buffers(copy.deepcopy(plain))
        plain(batch(sum(map(sum, sizes)), mini_batch))
        after = deferred_programs.buffers(copy.deepcopy(plain))
        expected += [before, before, before if missing else after, after]
    for found in members(2, deferred_programs.share, sizes, len(sizes) + missing):
        for seen, wanted in zip(found, expected, strict=True):
            assert_equal(seen, wanted)


def test_the_statistics_of_virtual_replicas_move_together_and_once():
    plain, layer = layers(3, "2d")
    moves = []
    layer.register_forward_hook(lambda replica, *_: moves.append((replica.running_mean.clone(), replica.running_var)))
    parallel = client.DataParallelWithCallback(layer, ["cpu"] * 2)
    x = samples(9, "2d")
    plain(x)
    for part in x.chunk(3):
        parallel(part)
    assert_equal(layer, plain)
    assert len(moves) == 6
    for mean, variance in moves[-2:]:
        assert torch.equal(mean, layer.running_mean)
        assert torch.equal(variance, layer.running_var)


def test_empty_micro_batches_are_counted_and_add_nothing():
    plain, layer = layers(3)
    x = samples(8)
    check_moves_as_whole(plain, layer, x.split((5, 0, 3)))
    for _ in range(3):
        layer(x[:0])
    assert layer.num_batches_tracked == 2
    torch.testing.assert_close(layer.running_mean, plain.running_mean, rtol=1e-12, atol=0)


def test_masked_values_are_left_out():
    plain, layer = layers(2, "1d of (N, C, L)")
    x = samples(8, "1d of (N, C, L)")
    mask = torch.arange(5) < torch.arange(8).view(-1, 1) % 5 + 1
    plain(x.movedim(1, -1)[mask].unsqueeze(2))
    for part, own in zip(x.chunk(2), mask.chunk(2), strict=True):
        layer(part, mask=own)
    assert_equal(layer, plain)


def test_a_micro_batch_that_fails_is_not_counted():
    plain, layer = layers(2)
    x = samples(8)
    plain(x)
    for part in (x[:4], x[:1], x[4:]):
        try:
            layer(part)
        except ValueError as error:
            assert "more than 1 value per channel" in str(error)  # noqa: PT017 - only one of the three calls raises
    assert_equal(layer, plain)


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}])
def test_layers_without_parameters_or_statistics_take_chunks_too(options):
    plain, layer = layers(2, **options)
    for part in samples(8).chunk(2):
        assert torch.equal(layer(part), copy.deepcopy(plain)(part))
    client.commit_running_statistics(layer)
    plain(samples(8))
    assert_equal(layer, plain)


def test_while_tracking_is_off_micro_batches_are_not_counted():
    plain, layer = layers(2)
    x = samples(8)
    plain(x)
    for part, tracks in ((x[:4], True), (x[2:6], False), (x[4:], True)):
        layer.track_running_stats = tracks
        layer(part)
    assert_equal(layer, plain)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_eval_nothing_is_counted_even_with_batch_statistics(compiled):
    torch.compiler.reset()
    _, layer = layers(2)
    layer.running_mean = layer.running_var = None
    run = torch.compile(layer.eval(), fullgraph=True, backend="aot_eager") if compiled else layer.eval()
    for part in samples(9).chunk(3):
        run(part, mask=torch.ones(3, dtype=torch.bool))
    client.commit_running_statistics(layer)
    assert layer.num_batches_tracked == 0


def test_pending_sums_are_not_in_the_state():
    _, layer = layers(2)
    layer(samples(4))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301 - our own bytes
        assert twin.chunks == 2
        client.commit_running_statistics(twin)
        assert unmoved(twin)
    assert layer.state_dict().keys() == nn.BatchNorm1d(3).state_dict().keys()
    client.commit_running_statistics(layer)
    assert not unmoved(layer)


@pytest.mark.parametrize(
    "replace",
    [
        lambda layer: layer.load_state_dict(nn.BatchNorm1d(3).state_dict()),
        lambda layer: layer.reset_running_stats(),
        lambda layer: client.recalibrate(layer, [samples(8)]),
    ],
    ids=["load_state_dict", "reset_running_stats", "recalibrate"],
)
def test_pending_sums_do_not_move_replaced_statistics(replace):
    _, layer = layers(2)
    layer(samples(4))
    replace(layer)
    before = copy.deepcopy(layer)
    client.commit_running_statistics(layer)
    assert_equal(layer, before, 0)


def test_recalibrate_measures_values_and_not_mini_batches():
    _, layer = layers(2)
    x = samples(8)
    client.recalibrate(layer, x.chunk(2))
    torch.testing.assert_close(layer.running_var, x.var(0), rtol=1e-12, atol=0)
    assert layer.num_batches_tracked == 0


def test_conversion_sets_chunks_and_keeps_them_unless_another_number_is_given():
    model = client.convert_model(nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.LazyBatchNorm1d())), chunks=4)
    assert [layer.chunks for layer in (model[0], model[1][0])] == [4, 4]
    assert "chunks=4" in repr(model)
    client.convert_model(model)
    assert model[0].chunks == 4
    client.convert_model(model, chunks=2)
    assert [layer.chunks for layer in (model[0], model[1][0])] == [2, 2]
    model = client.convert_model(client.revert_model(model))
    assert model[0].chunks == 1
    assert "chunks" not in repr(model)


def test_another_number_of_chunks_ends_the_mini_batch():
    plain, layer = layers(4)
    x = samples(8)
    plain(x[:4])
    for part in x[:4].chunk(2):
        layer(part)
    layer.chunks = 1
    assert_equal(layer, plain)
    check_moves_as_whole(plain, layer, [x])


@pytest.mark.parametrize(("chunks", "kind"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)])
def test_invalid_chunks_are_refused_and_nothing_is_changed(chunks, kind):
    model = nn.Sequential(nn.BatchNorm1d(3))
    for refuse in (
        lambda: client.convert_model(model, chunks=chunks),
        lambda: client.SynchronizedBatchNorm1d(3, chunks=chunks),
        lambda: client.LazySynchronizedBatchNorm2d(chunks=chunks),
        lambda: setattr(client.SynchronizedBatchNorm1d(3), "chunks", chunks),
    ):
        with pytest.raises(kind, match=rf"chunks: expected .*, got {chunks}"):
            refuse()
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("momentum", [pytest.param(0.1, marks=pytest.mark.long), None])
def test_members_compiled_whole_equal_eager_ones(members, momentum):
    for found, expected in members(2, deferred_programs.compiled, SHARES, momentum):
        assert_equal(found, expected)
        assert found["1.num_batches_tracked"] == 2


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_compiled_layer_alone_moves_its_statistics_as_the_whole_mini_batch(momentum):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(3, momentum=momentum).double()
    layer = client.convert_model(copy.deepcopy(plain), chunks=4)
    for each in (layer, copy.deepcopy(layer)):
        expected = copy.deepcopy(plain)
        run = torch.compile(each, fullgraph=True, backend="aot_eager")
        for x in (samples(9), samples(9) * 2):
            expected(x)
            for part in x.chunk(4):
                output = checkpoint(run, part.requires_grad_(), use_reentrant=False)
                torch.testing.assert_close(output, copy.deepcopy(plain)(part), rtol=1e-12, atol=1e-12)
                output.pow(3).sum().backward()
            client.commit_running_statistics(each)
            assert_equal(each, expected)


def test_torch_func_moves_the_buffers_it_is_given():
    plain, layer = layers(2)
    x = samples(8)
    plain(x)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    given = {name: value.clone() for name, value in layer.named_buffers()}

    def loss(parameters, given, x):
        return torch.func.functional_call(layer, (parameters, given), (x,)).pow(3).sum()

    for part in x.chunk(2):
        torch.func.grad(loss)(parameters, given, part)
    assert_equal({name: value.numpy() for name, value in given.items()}, plain)
    assert unmoved(layer)
