"""Types and layouts: half precision, autocast, mixtures, channels_last, and inputs that are views."""

import pytest
import torch

from support import shards
from support.shards import (
    AUTOCAST,
    HALVES,
    IMAGES,
    RESOLUTION,
    Shards,
    as_virtual_replicas,
    assert_equal,
    everywhere,
    on_the_whole_batch,
)
from support.subclasses import OWN_FORWARDS, Activated, Decorated, Functional, Scaled
from support.whole_batch import KINDS


@pytest.mark.parametrize("dtype", RESOLUTION)
def test_a_layer_of_any_type_equals_torchs(members, dtype):
    cases = [Shards(kind, (3, 0, 2), dtype) for kind in KINDS]
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        shards.assert_equal_to_torch_and_to_the_exact_result(found, case)


def test_a_float16_running_variance_stays_finite_although_the_batchs_variance_exceeds_float16(members):
    """The variance of the batch, about 90,000, exceeds float16's 65,504, but only a tenth enters the average."""
    case = Shards("2d", (3, 2), "float16", scale=300.0)
    (found,) = everywhere(members, [case])
    assert found.buffers["running_var"].isfinite().all()
    assert_equal(found.buffers, on_the_whole_batch(case).buffers, RESOLUTION["float16"])


@pytest.mark.parametrize("dtype", HALVES)
def test_half_input_with_float32_parameters_is_as_in_torch(members, dtype):
    cases = [Shards(kind, (3, 0, 2), "float32", input_dtypes=(dtype,) * 3) for kind in KINDS]
    # Count and sums of this case exceed float16's maximum, 65,504.
    cases.append(Shards("1d of (N, C, L)", (14_000, 0, 9), "float32", offset=20.0, input_dtypes=(dtype,) * 3))
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        shards.assert_equal_to_torch_and_to_the_exact_result(found, case)
        assert {value.dtype for value in found.parameters.values()} == {torch.float32}


@pytest.mark.parametrize(
    "dtypes",
    [("float32", "bfloat16", "float64"), ("float16", "float64", "float16"), ("bfloat16", "float32", "float16")],
)
def test_replicas_may_differ_in_type_within_a_round(members, dtypes):
    case = Shards("2d", (3, 2, 4), "float32", input_dtypes=dtypes)
    (found,) = everywhere(members, [case])
    exact = on_the_whole_batch(case, torch.float64)
    for own, output, gradient, exact_output, exact_gradient in zip(
        dtypes, found.outputs, found.gradients, exact.outputs, exact.gradients, strict=True
    ):
        assert (output.dtype, gradient.dtype) == (getattr(torch, own),) * 2
        # Float32 parameters, and replicas that compute in float32, limit the precision.
        part = {"output": output.double(), "gradient": gradient.double()}
        assert_equal(part, {"output": exact_output, "gradient": exact_gradient.double()}, max(RESOLUTION[own], 1e-6))
    rest = {
        name: value
        for name, value in found.named().items()
        if name in found.buffers or name in {"weight gradient", "bias gradient"}
    }
    assert_equal(rest, shards.rounded({name: exact.named()[name] for name in rest}, rest), 1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_members_equal_the_whole_batch(members, dtype):
    ((first, second),) = autocast_on_members(members, dtype)
    assert_equal(together(first, second), shards.autocast_on_the_whole_batch("cpu", dtype), AUTOCAST[dtype])


EVERY_WAY = [Activated, Functional, Decorated, Scaled]


@pytest.mark.parametrize(
    ("dtype", "kinds", "backend"),
    [
        *((dtype, OWN_FORWARDS, "") for dtype in HALVES),
        pytest.param("bfloat16", [Functional, Scaled], "aot_eager", id="compiled"),
        pytest.param("float16", EVERY_WAY, "aot_eager", id="compiled in half", marks=pytest.mark.long),
    ],
)
def test_autocast_members_with_a_subclass_equal_the_whole_batch(members, dtype, kinds, backend):
    outcomes = autocast_on_members(members, dtype, kinds, backend)
    for kind, (first, second) in zip(kinds, outcomes, strict=True):
        model = shards.autocast_model(kind)
        expected = shards.autocast_step(model, model, "cpu", dtype)
        assert_equal(together(first, second), expected, AUTOCAST[dtype])
        assert (first["output"].dtype, second["output"].dtype) == (expected["output"].dtype,) * 2, kind


def autocast_on_members(members, dtype, *others):
    return zip(*map(shards.loaded, members(2, shards.as_autocast_member, dtype, *others)), strict=True)


def together(first, second):
    found = {}
    for name, value in first.items():
        if name in {"output", "input gradient"}:
            found[name] = torch.cat([value, second[name]])
        elif "gradient" in name:
            found[name] = value + second[name]
        else:
            assert torch.equal(value, second[name]), name
            found[name] = value
    return found


@pytest.mark.parametrize("kind", IMAGES)
def test_one_replica_may_be_channels_last_and_another_not(members, kind):
    layouts = [("channels_last", "contiguous", "contiguous"), ("contiguous", "channels_last", "channels first")]
    cases = [Shards(kind, (2, 3, 1), dtype, layouts=way) for way in layouts for dtype in ("float64", "float32")]
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        assert_equal(found.named(), on_the_whole_batch(case).named(), RESOLUTION[case.dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_be_views_of_any_sort(members, kind):
    ways = [way for way in shards.LAYOUTS if way != "channels_last" or kind in IMAGES]
    ways = [way for way in ways if "position" not in way or kind != "1d of (N, C)"]  # its last dimension is the channel
    cases = [Shards(kind, (3, 2, 2), layouts=(way, "contiguous", way)) for way in ways]
    for case, found in zip(cases, everywhere(members, cases), strict=True):
        assert_equal(found.named(), on_the_whole_batch(case).named(), RESOLUTION["float64"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", [(), ("all",)])
def test_output_and_gradient_lie_in_memory_as_torchs(kind, masks):
    """A `view` that works on torch's output for a transposed input must work on ours."""
    ways = [way for way in shards.LAYOUTS if way != "channels_last" or kind in IMAGES]
    for way in ways:
        case = Shards(kind, (3, 0), "float32", layouts=(way, "contiguous"), masks=masks * 2)
        found = as_virtual_replicas(case)
        alone = case.shards()[0]
        output = case.layer(synchronised=False)(alone.x)
        (gradient,) = torch.autograd.grad(output, alone.x, alone.factors)
        assert (found.outputs[0].stride(), found.gradients[0].stride()) == (output.stride(), gradient.stride()), way
