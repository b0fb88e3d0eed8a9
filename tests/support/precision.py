"""How exact a layer of each type has to be, and what it is compared with."""

import torch

from support import shards
from support.shards import assert_equal, on_the_whole_batch

HALVES = ("float16", "bfloat16")

# Both sides compute in a wider type and round once, so they may end on neighbours: one unit in the last place. Where
# parameters' gradients are rounded on each replica and added, that is one of the largest.
RESOLUTION = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5, "float64": 1e-10}

# The convolution rounds too, otherwise for other batch sizes, and its weight's gradient is rounded on each replica.
AUTOCAST = {dtype: 2 * RESOLUTION[dtype] for dtype in HALVES}


def rounded(exact, like):
    return {name: value.to(like[name].dtype) for name, value in exact.items()}


def without(named, *words):
    return {name: value for name, value in named.items() if not any(word in name for word in words)}


def assert_equal_to_torch_and_to_the_exact_result(found, case):
    """Torch computes some things in half precision that are wider here, so the exact result is the stricter one."""
    resolution = max(RESOLUTION[dtype] for dtype in (case.dtype, *case.input_dtypes))
    found, expected = found.named(), on_the_whole_batch(case).named()
    assert_equal(found, expected, resolution)
    exact = rounded(on_the_whole_batch(case, torch.float64).named(), found)
    assert_equal(found, exact, resolution)
    for name in without(found, "weight", "bias", "running", "tracked"):
        off = (found[name].double() - exact[name].double()).abs()
        unit = torch.finfo(found[name].dtype).eps * exact[name].double().abs()
        assert (off <= unit + 1e-5).all(), name


def autocast_on_the_whole_batch(device, dtype):
    model = shards.autocast_model().to(device)
    expected = shards.autocast_step(model, model, device, dtype)
    assert expected["output"].dtype == getattr(torch, dtype)
    return expected
