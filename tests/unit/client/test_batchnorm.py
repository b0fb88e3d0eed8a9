"""The layers behave like torch's, and name bad input in their errors."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import client
from client.nn import running_stats
from client.ops import engine
from client.ops.statistics import to_compute_type
from programs import member_programs
from support.sentences import says
from support.whole_batch import SYNCHRONISED

LAYERS = list(SYNCHRONISED.items())


def test_a_layer_takes_torchs_arguments_and_eps_mode():
    layer = client.SynchronizedBatchNorm2d(
        3, 1e-3, None, affine=False, track_running_stats=False, eps_mode="clamp", device="cpu", dtype=torch.float64
    )
    assert (layer.eps, layer.momentum, layer.weight, layer.running_mean) == (1e-3, None, None, None)
    assert "eps_mode='clamp'" in repr(layer)
    assert client.SynchronizedBatchNorm2d(3, dtype=torch.float64).weight.dtype == torch.float64


def test_an_unknown_eps_mode_is_named():
    with pytest.raises(ValueError, match=r"eps_mode: expected one of \('plus', 'clamp'\), got 'minus'"):
        client.SynchronizedBatchNorm2d(3, eps_mode="minus")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("plain", "ours"), LAYERS)
def test_a_layer_alone_equals_torchs_to_the_last_bit(plain, ours, training):
    shape = (5, 4) + (3,) * {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[plain]
    x = torch.randn(shape)
    expected, found = plain(4).train(training), ours(4).train(training)
    assert torch.equal(found(x), expected(x))
    for name, buffer in expected.named_buffers():
        assert torch.equal(found.get_buffer(name), buffer), name


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (client.SynchronizedBatchNorm2d(64), (2, 32, 4, 4), r"'stem.bn': expected 64 channels, got 32"),
        (client.SynchronizedBatchNorm1d(4), (4,), "expected 2D or 3D input"),
        (client.SynchronizedBatchNorm2d(4), (2, 4), "expected 4D input"),
        (client.SynchronizedBatchNorm3d(4), (2, 4, 1, 1), "expected 5D input"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_input_of_the_wrong_shape_is_named(layer, shape, message, training):
    layer.layer_name = "stem.bn"
    with pytest.raises(ValueError, match=message):
        layer.train(training)(torch.ones(shape))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_inputs_of_unsupported_types_are_named():
    layer = client.SynchronizedBatchNorm1d(4)
    expected = f"{layer.layer_name!r}: expected an input of float16, bfloat16, float32 or float64, got"
    for dtype in (torch.int64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, check=says(f"{expected} {str(dtype)[6:]}$")):
            layer(torch.ones(2, 4).to(dtype))
    with pytest.raises(TypeError, check=says(rf"{expected} quint8; quantise the model after client.revert_model")):
        layer(torch.quantize_per_tensor(torch.ones(2, 4), 1.0, 0, torch.quint8))


def test_one_value_per_channel_is_refused_on_every_member(members):
    for error in members(2, member_programs.one_value_per_channel):
        assert error.startswith("ValueError: layer 'bn': expected more than 1 value per channel over all replicas")


def test_members_with_different_channel_counts_get_an_error_with_the_layer_and_the_numbers(members):
    errors = members(2, member_programs.other_channels)
    expected = ("RoundMismatch", "layer 'bn'", "channels, as rank")
    assert any(all(text in error for text in expected) for error in errors), errors
    assert all("RoundMismatch" in error or "ReplicaLost" in error for error in errors), errors


def test_bad_input_breaks_nothing_else(members):
    for errors, output_sum in members(2, member_programs.bad_input_then_good):
        assert errors == ["ValueError", "ValueError", "TypeError"]
        assert abs(output_sum) < 1e-4


def test_nan_passes_through_as_in_torch(members):
    results, whole = members(2, member_programs.nan_in_one_channel), member_programs.nan_on_whole_batch()
    for found, expected in zip(results, whole, strict=True):
        assert (found == expected).all()


@pytest.mark.parametrize("momentum", [0.3, None])
def test_tracking_switched_off_for_a_while_moves_nothing_as_in_torch(momentum):
    expected = nn.BatchNorm1d(3, momentum=momentum)
    found = client.convert_model(copy.deepcopy(expected))
    wrapped = client.DataParallelWithCallback(found, ["cpu"] * 2)
    for tracked in (True, False, True):
        expected.track_running_stats = found.track_running_stats = tracked
        x = torch.randn(8, 3) + 2
        torch.testing.assert_close(wrapped(x), expected(x))
        torch.testing.assert_close(dict(found.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("has_values", [False, torch.zeros((), dtype=torch.bool)], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_empty_batch_is_counted_and_leaves_infinite_statistics_as_they_are(dtype, has_values, momentum):
    layer = client.SynchronizedBatchNorm1d(2, momentum=momentum, dtype=dtype)
    layer.running_mean.fill_(-torch.inf)
    layer.running_var.fill_(torch.inf)
    running_stats.update(layer, torch.zeros(2), torch.zeros(2), has_values=has_values)
    assert layer.num_batches_tracked == 1
    assert layer.running_mean.tolist() == [-torch.inf] * 2
    assert layer.running_var.tolist() == [torch.inf] * 2


def test_mean_and_variance_go_to_the_running_statistics_in_one_copy(monkeypatch):
    layer = client.SynchronizedBatchNorm1d(2)
    copies = []

    def record(*given):
        copies.append(given)
        return to_compute_type(*given)

    monkeypatch.setattr(running_stats, "to_compute_type", record)
    batch = engine.moments(torch.randn(8, 2))
    running_stats.update_from(layer, batch)
    ((to, *vectors),) = copies
    assert to is layer.running_mean
    np.testing.assert_array_equal(vectors, [batch.mean(), batch.variance(unbiased=True)])


def test_layers_made_by_hand_have_different_names():
    first, second = client.SynchronizedBatchNorm1d(3), client.SynchronizedBatchNorm1d(3)
    assert first.layer_name != second.layer_name
    assert first.layer_name.startswith("SynchronizedBatchNorm1d-")
