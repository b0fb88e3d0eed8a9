"""Half precision, autocast and channels_last on each device, by replicas of one process."""

import pytest

import client
from support import shards
from support.shards import (
    AUTOCAST,
    HALVES,
    IMAGES,
    Shards,
    as_virtual_replicas,
    assert_equal,
    assert_equal_to_torch_and_to_the_exact_result,
    autocast_on_the_whole_batch,
    channels_last,
)


@pytest.mark.parametrize(
    ("parameters", "inputs"), [*zip(HALVES, HALVES, strict=True), *(("float32", half) for half in HALVES)]
)
def test_replicas_in_half_precision_equal_torchs_layer(device, parameters, inputs):
    case = Shards("2d", (3, 2), parameters, input_dtypes=(inputs,) * 2, device=device)
    assert_equal_to_torch_and_to_the_exact_result(as_virtual_replicas(case), case)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_replicas_equal_the_whole_batch(device, dtype):
    model = client.convert_model(shards.autocast_model()).to(device)
    found = shards.autocast_step(model, client.DataParallelWithCallback(model, [device] * 2), device, dtype)
    assert_equal(found, autocast_on_the_whole_batch(device, dtype), AUTOCAST[dtype])


@pytest.mark.parametrize("kind", IMAGES)
def test_channels_last_is_kept_in_output_and_gradient(kind, device):
    for masks in ((), ("some", "some")):
        case = Shards(kind, (3, 2), "float32", layouts=("channels_last",) * 2, masks=masks, device=device)
        found = as_virtual_replicas(case)
        for tensor in (*found.outputs, *found.gradients):
            assert tensor.is_contiguous(memory_format=channels_last(tensor))
            assert not tensor.is_contiguous()
