"""The native core's kernels against float64, and its statistics against numpy's and torch's to the bit."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from client.native import library
from client.nn.running_stats import update
from client.ops.statistics import ChannelMoments, ChannelStatistics
from support.paths import ROOT

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

# Relative errors: three roundings in float32, one more to half precision; for float64 also the error of the reference.
OFF = {torch.float32: 2e-7, torch.float64: 1e-13, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

PLANES = [(3, 5, 49), (1, 3, 17), (5, 1, 33), (2, 700, 3), (9, 3, 4099), (4, 2, 16400)]
ROWS = [(147, 5), (1, 17), (5, 1), (6, 700), (4099, 24)]

SPECIAL = [0.0, 1e-310, 1.0, 1e300, np.inf, -np.inf, np.nan]


CORE = library.library()


@pytest.fixture(params=range(CORE.holding.sbn_level(-1) + 1 if CORE else 1), ids=library.LEVELS.__getitem__)
def core(request):
    """The core, limited to one level of instructions; a test runs at each level that this processor has."""
    assert CORE, library.description()
    best = CORE.holding.sbn_level(-1)
    CORE.holding.sbn_level(request.param)
    yield CORE.releasing
    CORE.holding.sbn_level(best)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at(tensor):
    return None if tensor is None else tensor.data_ptr()


def vectors(number, c):
    return torch.full((number * c + 1,), torch.nan, dtype=torch.float64)


def plan_of(x, weight=None, bias=None, running=None, eps=1e-5, clamp=False, momentum=0.1, threads=1):
    n, c, *rest = x.shape
    types = (0 if each is None else DTYPES[each.dtype] for each in (weight, bias, running))
    sizes = n, c, *(rest or [1]), DTYPES[x.dtype], not rest, threads
    return ctypes.byref(library.Plan(*sizes, *types, clamp, eps, momentum))


def run(function, plan, *tensors, stage=library.FINISH):
    assert function(plan, *map(at, tensors), stage, None, 0, 0) == library.DONE


def forward(core, x, total, weight=None, bias=None, **given):
    y, saved = torch.full_like(x, torch.nan), vectors(3, x.shape[1])
    rows = torch.cat((torch.full_like(total, torch.nan), total))
    run(core.sbn_forward, plan_of(x, weight, bias, **given), rows, saved, x, y, weight, bias, None, None, None)
    return y, saved


def moments(core, x, threads=1):
    row = vectors(2, x.shape[1])
    run(core.sbn_forward, plan_of(x, threads=threads), row, None, x, *[None] * 6, stage=library.MEASURE)
    return row


def backward_sums(core, dy, x, saved, threads=1):
    row = vectors(2, x.shape[1])
    run(core.sbn_backward, plan_of(x, threads=threads), row, saved, dy, x, *[None] * 4, stage=library.MEASURE)
    return row


def assert_near(found, exact, off):
    worst = (found.double() - exact).abs().max() if exact.numel() else 0
    assert worst <= off * exact.abs().max() + (2.0**-25 if found.dtype == torch.float16 else 0)


@pytest.mark.parametrize("shape", PLANES + ROWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ratio", [0, 1000])
def test_a_layer_agrees_with_float64(core, dtype, shape, ratio):
    c, off = shape[1], OFF[dtype]
    x, dy = (random(*shape) + ratio).to(dtype), random(*shape, seed=1).to(dtype)
    weight, bias = random(c, seed=2).to(dtype), random(c, seed=3).float()
    wide, grad = (v.double().transpose(0, 1).reshape(c, -1) for v in (x, dy))
    number, mean = wide.shape[1], wide.mean(1, keepdim=True)
    centred = wide - mean
    invstd = (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    row = moments(core, x)
    assert row[-1] == number
    torch.testing.assert_close(row[:c], wide.sum(1), rtol=1e-13, atol=1e-11 * number**0.5)
    torch.testing.assert_close(row[c:-1], wide.square().sum(1), rtol=1e-13, atol=0)

    y, saved = forward(core, x, row, weight, bias)
    by = invstd * weight.double().unsqueeze(1)
    rounding = 1e-8 if ratio and dtype == torch.float64 else 0  # the exchanged sums err by 2^-53 mean² / variance
    assert_near(y.transpose(0, 1).reshape(c, -1), centred * by + bias.double().unsqueeze(1), off + rounding)

    own = backward_sums(core, dy, x, saved)
    first, second = grad.sum(1), (grad * centred).sum(1)
    torch.testing.assert_close(own[:c], first, rtol=1e-12, atol=1e-12 * number**0.5)
    torch.testing.assert_close(own[c:-1], second, rtol=1e-12, atol=1e-12 * number**0.5 * (1 + ratio))
    dx, dweight, dbias = (torch.full_like(each, torch.nan) for each in (x, weight, bias))
    rows = torch.cat((own, own))
    run(core.sbn_backward, plan_of(x, weight, bias), rows, saved, dy, x, dx, weight, dweight, dbias)
    terms = grad - first.unsqueeze(1) / number - centred * invstd.square() * second.unsqueeze(1) / number
    worst = (dx.transpose(0, 1).reshape(c, -1).double() - by * terms).abs().max()
    assert worst <= (off + rounding) * (by * grad).abs().max()
    assert_near(dweight, second * invstd.squeeze(1), off + rounding)
    assert_near(dbias, first, 1e-7)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 3)], ids=str)
def test_an_empty_slice_has_empty_sums_and_takes_part(core, shape):
    x = torch.empty(shape)
    row = moments(core, x)
    assert row.tolist() == [0.0] * 7
    _, saved = forward(core, x, torch.tensor([2.0, 4, 6, 4, 8, 18, 2], dtype=torch.float64))
    assert saved[:3].tolist() == [1, 2, 3]
    assert backward_sums(core, x, x, saved).tolist() == [0.0] * 7
    _, saved = forward(core, x, row)
    assert saved[:9].tolist() == [0.0] * 9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 9, 21), (63, 9)], ids=str)
def test_nan_and_infinity_affect_only_their_channel(core, dtype, shape):
    x = random(*shape).to(dtype)
    clean, _ = forward(core, x, moments(core, x))
    for place, value in ((0, np.nan), (5, np.inf)):
        x[place % 3, place] = value
    row = moments(core, x)
    assert row[:-1].isfinite().view(2, 9).sum(1).tolist() == [7, 7]
    assert row[0].isnan()
    assert row[5] == np.inf
    y, _ = forward(core, x, row)
    for channel in range(9):
        expected = torch.full_like(clean[:, channel], torch.nan) if channel in {0, 5} else clean[:, channel]
        torch.testing.assert_close(y[:, channel], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_read_and_rounded_as_torch_does(core, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, 1, -1)
    nothing = torch.tensor([0.0, 1, 1], dtype=torch.float64)
    for factor in (1.0, 1 + 2.0**-9, 1 + 2.0**-12, 2.0**-13, 3 * 2.0**-120):
        weight, y = torch.tensor([factor]), torch.empty_like(every)
        run(core.sbn_forward, plan_of(every, weight), None, nothing, every, y, weight, *[None] * 4)
        torch.testing.assert_close(y, (every.float() * factor).to(dtype), rtol=0, atol=0, equal_nan=True)
        nans = y[every.isnan()].view(torch.int16).unique().tolist()
        assert nans == ([0x7FC0] if dtype == torch.bfloat16 else [0xFE00 - 2**16, 0x7E00])
    single = every.flatten()[None]
    expected = torch.cat((single.double(), single.double().square()), dim=1)[0]
    torch.testing.assert_close(moments(core, single)[:-1], expected, rtol=0, atol=0, equal_nan=True)
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    near = every.flatten().float()[:, None] * torch.tensor([1, 1 + 2.0**-9, 1 + 2.0**-12, 1 + 2.0**-12 + 2.0**-22])
    wide = torch.cat((bits.to(torch.int32).view(torch.float32), near.flatten(), torch.linspace(-1e-4, 1e-4, 99_999)))
    c = len(wide)
    row, found = torch.cat((wide, wide)).double(), torch.empty(c, dtype=dtype)
    run(core.sbn_backward, plan_of(wide[None], bias=found), row, vectors(3, c), *[None] * 5, found)
    torch.testing.assert_close(found, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("momentum", [0.1, 0.7, 0.0, None])
@pytest.mark.parametrize("running", [*DTYPES, None], ids=str)
@pytest.mark.parametrize(("eps", "eps_mode"), [(1e-5, "plus"), (1e-5, "clamp"), (0.5, "clamp")])
def test_statistics_have_the_bits_of_torchs_operators(count, momentum, running, eps, eps_mode):
    values = np.array([(s, q) for s in SPECIAL for q in SPECIAL])
    sums, squares = np.concatenate((values, random(999, 2).numpy() * [30, 900] + [0, 900])).T.copy()
    squares[-9:] = sums[-9:] ** 2 / max(count, 1)
    if count == 0:
        sums, squares = np.zeros((2, *sums.shape))
    c, batch = len(sums), ChannelMoments(count, torch.from_numpy(np.stack((sums, squares))))
    buffers = [random(c, seed=seed).to(running) for seed in (4, 5)] if running else [None, None]
    tracked = torch.tensor(3)
    layer = SimpleNamespace(track_running_stats=True, momentum=momentum, num_batches_tracked=tracked.clone())
    layer.running_mean, layer.running_var = (None if v is None else v.clone() for v in buffers)
    total = torch.from_numpy(np.concatenate((sums, squares, [count])))
    saved = vectors(3, c)
    moved = np.nan if momentum is None else momentum
    plan = plan_of(torch.empty(0, c), None, None, buffers[0], eps, eps_mode == "clamp", moved)
    run(CORE.holding.sbn_forward, plan, torch.cat((total, total)), saved, *[None] * 4, *buffers, tracked)
    statistics = saved[:-1].view(3, c)
    expected = ChannelStatistics.of(batch, eps, eps_mode)
    assert_same_bits(statistics[0], expected.mean)
    assert_same_bits(statistics[1], expected.invstd)
    assert_same_bits(statistics[2], expected.slope * (count > 0))
    update(layer, batch.mean(), batch.variance(unbiased=True), has_values=count > 0)
    assert tracked == layer.num_batches_tracked == 4
    if running:
        assert_same_bits(buffers[0], layer.running_mean)
        assert_same_bits(buffers[1], layer.running_var)


def assert_same_bits(found, expected):
    """Compares bits; any NaN equals any other."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    bits = [torch.where(v.isnan(), torch.nan, v).view(integers) for v in (found, expected)]
    assert torch.equal(*bits), (found, expected)


def a_layer(core, x, threads):
    row = moments(core, x, threads)
    y, saved = forward(core, x, row, threads=threads)
    own, dx = backward_sums(core, y, x, saved, threads), torch.empty_like(x)
    run(core.sbn_backward, plan_of(x, threads=threads), torch.cat((own, own)), saved, y, x, dx, None, None, None)
    return row, y, own, dx


def equal(found, expected):
    return all(map(torch.equal, found, expected))


LARGE = [random(3, 5, 11_003).float(), random(4, 16, 16_400).bfloat16(), random(40_999, 24).float()]
LARGE += [random(2, 1, 99_999)]


@pytest.mark.parametrize("x", LARGE, ids=lambda x: str(tuple(x.shape)))
def test_no_bit_depends_on_the_number_of_threads(core, x):
    alone = a_layer(core, x, 1)
    assert all(equal(a_layer(core, x, threads), alone) for threads in (2, 3, 64) for _ in range(5))


@pytest.mark.parametrize("shape", [(2, 9, 31), (9, 3, 4099), (2, 700, 3), (50, 31), (7, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_bit_depends_on_the_instructions(core, dtype, shape):
    scale = torch.logspace(-6, 4, shape[1], dtype=torch.float64).view(-1, *[1] * (len(shape) - 2))
    x = (random(*shape) * scale).to(dtype)
    found = a_layer(core, x, 1)
    CORE.holding.sbn_level(0)
    assert equal(found, a_layer(core, x, 1))


def test_several_callers_share_the_threads_or_go_without(core):
    alone = [a_layer(core, x, 1) for x in LARGE]

    def call(number):
        return all(equal(a_layer(core, LARGE[i % 4], 3), alone[i % 4]) for i in range(number, number + 8))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(4), timeout=100))


def test_forked_children_have_their_own_threads_and_all_end():
    command = [sys.executable, str(ROOT / "tests" / "programs" / "native_forks.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "all equal\n"), done.stderr
