"""On a CPU: torch's vectorised operators, fed with our statistics.

What torch's own layer spends on a CPU goes mostly into reductions that are slow. Other operators of torch take the same
sums at the speed of memory: that of its group norm's backward takes Σg and Σg·x of each plane in one pass, and that of
its batch norm's backward, where channels lie last, of each channel. Elementwise work goes through eval mode,
`x*factor + addend`, in blocks that stay in the cache where more than one operator works on them.

Every function wants dense tensors, as `layout.dense` returns them, and sees them in one of two shapes: planes
(N, C, *) of a contiguous one, or rows (R, C) of one whose channels lie last.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from statsd_bn.reduction import FloatArray, sum_in_order

_normalise = torch.ops.aten.native_batch_norm.out
_reduce_planes = torch.ops.aten.native_group_norm_backward.default
_reduce_rows = torch.ops.aten.native_batch_norm_backward.default

# The types that are computed in, as numpy has them.
_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}

# Their least numbers. One is added to variances, which changes no normal one, since one that is rounded to 0 would make
# NaN of an input of 0.
_LEAST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}

# Which of their three results the two reductions compute: not the gradient of the input.
_REDUCTIONS = [False, True, True]

# Elements that pass through several operators at a time, per thread: 4 MB of float32, which the caches hold. Whole
# tensors of 25 MB took 1.2 times as long, and up to twice where others use the cache. Half precision needs
# twice the room while it is widened.
BLOCK, WIDENED_BLOCK = 2**20, 2**19

# Each operator on each block costs a meeting of the threads, and that is dear where others use the cores. So blocks
# grow with their number, up to this one, that what is widened stay small; and where nothing is widened there is one.
THREADS = 4

# The reductions add in float32, a plane in 16 columns and rows one by one, so that many values would lose digits. So
# long planes are cut, rows are dealt to more columns and into parts, and all these sums are added in float64. Planes
# that cannot be cut below the second length are left to others.
LONG_PLANE, LONGEST_PLANE = 2**13, 2**16
COLUMNS, ROWS = 1024, 1024

# Sums of squares that are not centred cost the variance (1 + 2 mean² / variance) roundings of float32, in which parts
# this short add; up to this ratio that is no digit, and centring would cost the layer half as much again.
NEAR = 4.0

# Planes up to this length have more overhead than arithmetic in eval mode: `mul` and `add` take 0.7 times as long.
SHORT_PLANE = 64

# Slices up to so many values take less time in arithmetic than in calls. So their planes are normalised by one operator
# that takes mean, deviation, weight and bias as they are, and the sums of up to so many samples are left to the
# reduction: no more of them are added one by one in float32 than rows are.
SMALL, FEW_SAMPLES = 2**15, 2**6

# From which size on huge pages are asked for, in bytes: numpy's.
HUGE, PAGE = 2**22, mmap.PAGESIZE


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return cast("Callable[[int, int, int], int]", function)


_madvise = _find_madvise()


def takes(x: Tensor) -> bool:
    """Whether `x`, dense or not, may come here."""
    return x.is_cpu and x.numel() > 0 and (x.dim() < 3 or _plane(x) <= LONGEST_PLANE)  # noqa: PLR2004


def are_near_zero(first: FloatArray, second: FloatArray, number: int) -> bool:
    """Whether mean² <= NEAR * variance in all channels, by their Σx and Σx²; NaN and infinity are not."""
    return bool((first * first * ((1 + 1 / NEAR) / number) <= second).all())


def shifted_sums(x: Tensor, center: FloatArray) -> FloatArray:
    """Returns Σ(x - c) and Σ(x - c)², shape (2, C); `center`, c, has shape (C,) and whatever the compute type holds."""
    view = _view(x)
    (repeated,) = _vectors(view, center)
    shift = _alongside(repeated, view)
    room = torch.empty_like(view[: _step(BLOCK, view)], dtype=shift.dtype)
    shifted = (torch.sub(part, shift, out=room[: part.shape[0]]) for (part,) in _blocks(BLOCK, view))
    by_column = sum_in_order(sums(block, block) for block in shifted)
    found: FloatArray = by_column.reshape(2, -1, x.shape[1]).sum(1)
    return found


def sums(grad: Tensor, x: Tensor) -> FloatArray:
    """Returns Σg and Σg·x, shape (2, C); `grad`, g, is of the type and layout of `x`."""
    rows = _rows(x)
    if rows is None:
        return _sums_of_planes(grad, x)
    grad_rows = rows if grad is x else _rows(grad)
    assert grad_rows is not None  # noqa: S101 - they lie alike
    return _sums_of_rows(grad_rows, rows)


def _sums_of_planes(grad: Tensor, x: Tensor) -> FloatArray:
    """Takes each plane for a channel of one group with mean 0 and deviation 1, and asks for the affine gradients."""
    length, samples, channels = _plane(x), x.shape[0], x.shape[1]
    if samples <= FEW_SAMPLES and length * samples * channels == x.numel() <= SMALL:
        mean, deviation = _zero_and_one((samples, 1), _wide(x))
        _, weight = _zero_and_one((channels,), _wide(x))
        _, second, first = _reduce_planes(grad, x, mean, deviation, weight, samples, channels, length, 1, _REDUCTIONS)
        return np.array((first.numpy(), second.numpy()), dtype=np.float64)
    planes = x.numel() // length
    mean, deviation = _zero_and_one((1, 1), _wide(x))
    _, weight = _zero_and_one((planes,), _wide(x))
    _, second, first = _reduce_planes(grad, x, mean, deviation, weight, 1, planes, length, 1, _REDUCTIONS)
    by_plane = np.array((first.numpy(), second.numpy()), dtype=np.float64)
    by_channel: FloatArray = by_plane.reshape(2, x.shape[0], -1).sum(1)
    return by_channel if by_channel.shape[1] == x.shape[1] else by_channel.reshape(2, x.shape[1], -1).sum(2)


def _sums_of_rows(grad: Tensor, rows: Tensor) -> FloatArray:
    number, channels = rows.shape
    fold = max(1, min(COLUMNS // channels, number))
    if rest := number % fold:
        return _sums_of_rows(grad[:-rest], rows[:-rest]) + _sums_of_columns(grad[-rest:], rows[-rest:])
    if fold == 1 and number <= ROWS:
        return _sums_of_columns(grad, rows)
    columns = fold * channels
    parts = _blocks(ROWS * columns, grad.view(-1, columns), rows.view(-1, columns))
    dealt = sum_in_order(_sums_of_columns(*part) for part in parts)
    found: FloatArray = dealt.reshape(2, fold, channels).sum(1)
    return found


def _sums_of_columns(grad: Tensor, rows: Tensor) -> FloatArray:
    zero, one = _zero_and_one(rows.shape[1:], _wide(rows))
    training, eps = True, 0.0
    _, second, first = _reduce_rows(grad, rows, None, None, None, zero, one, training, eps, _REDUCTIONS)
    return np.array((first.numpy(), second.numpy()), dtype=np.float64)


@lru_cache(maxsize=64)
def _zero_and_one(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with no_dispatch():  # what a mode makes, such as a fake tensor, would stay for all later calls
        return torch.zeros(shape, dtype=dtype, device="cpu"), torch.ones(shape, dtype=dtype, device="cpu")


def normalise_small(
    x: Tensor, mean: FloatArray, invstd: FloatArray, weight: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Returns the output for a dense `x`; None where it is large, or lies or is typed otherwise than this is fast for.

    Args:
        x: shape (N, C, *).
        mean: shape (C,), so few deviations from 0 that x need not be centred before it is scaled.
        invstd: shape (C,).
        weight: shape (C,) or None for 1.
        bias: shape (C,) or None for 0.
    """
    dtype = x.dtype
    if x.numel() > SMALL or x.dim() < 3 or dtype not in _NUMPYS or not x.is_contiguous():  # noqa: PLR2004 - no planes
        return None
    if (weight is not None and weight.dtype != dtype) or (bias is not None and bias.dtype != dtype):
        return None
    numpys = _NUMPYS[dtype]
    center, variance = torch.from_numpy(mean.astype(numpys)), torch.from_numpy((1 / (invstd * invstd)).astype(numpys))
    training, momentum = False, 0.0
    output: Tensor = torch.native_batch_norm(x, weight, bias, center, variance, training, momentum, _LEAST[dtype])[0]
    return output


def scale(x: Tensor, factor: FloatArray, addend: FloatArray) -> Tensor:
    """Returns x * factor + addend, rounded to the type of `x` once; vectors of shape (C,)."""
    output = output_for(x)
    view, into = _views(x, output)
    _scale(view, into, *_vectors(view, factor, addend))
    return output


def combine(grad: Tensor, x: Tensor, by_grad: FloatArray, factor: FloatArray, addend: FloatArray) -> Tensor:
    """Returns g * by_grad + x * factor + addend, rounded to the type of `x` once.

    Args:
        grad: g, of the type and layout of `x`.
        x: shape (N, C, *).
        by_grad: shape (C,), as the other vectors.
        factor: shape (C,).
        addend: shape (C,).
    """
    output = output_for(x)
    views = _views(grad, x, output)
    vectors = list(_vectors(views[1], by_grad, factor, addend))
    (_combine if vectors[0].dtype == x.dtype else _combine_widened)(*views, *vectors)
    return output


def _combine(grad: Tensor, x: Tensor, output: Tensor, by_grad: Tensor, factor: Tensor, addend: Tensor) -> None:
    by_grad = _alongside(by_grad, x)
    size = BLOCK if torch.get_num_threads() == 1 else x.numel()
    for grad_part, part, into in _blocks(size, grad, x, output):
        _scale(part, into, factor, addend)
        into.addcmul_(grad_part, by_grad)


def _combine_widened(grad: Tensor, x: Tensor, output: Tensor, by_grad: Tensor, factor: Tensor, addend: Tensor) -> None:
    by_grad, factor, addend = (_alongside(vector, x) for vector in (by_grad, factor, addend))
    room = torch.empty_like(x[: _step(WIDENED_BLOCK, x)], dtype=factor.dtype)
    room_for_grad = torch.empty_like(room)
    for grad_part, part, into in _blocks(WIDENED_BLOCK, grad, x, output):
        wide = room[: part.shape[0]].copy_(part)
        if x.dim() == 2:  # noqa: PLR2004
            torch.addcmul(addend, wide, factor, out=wide)
        else:
            wide.mul_(factor).add_(addend)
        into.copy_(wide.addcmul_(room_for_grad[: part.shape[0]].copy_(grad_part), by_grad))


def _on_huge_pages(x: Tensor) -> Tensor:
    """Returns an empty tensor like `x`, on huge pages where the system gives them to those who ask, as numpy does.

    The first touch of 25 MB in pages of 4 kB takes as long as all the arithmetic on them.
    """
    output = torch.empty_like(x)
    if _madvise is not None and output.nbytes >= HUGE:
        start, end = -(-output.data_ptr() // PAGE) * PAGE, (output.data_ptr() + output.nbytes) // PAGE * PAGE
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)
    return output


def output_for(x: Tensor) -> Tensor:
    """Returns an empty tensor like `x`, on huge pages if one thread will touch it first.

    For several threads huge pages were no faster, and the slowest call much slower.
    """
    return _on_huge_pages(x) if torch.get_num_threads() == 1 else torch.empty_like(x)


def _scale(x: Tensor, into: Tensor, factor: Tensor, addend: Tensor) -> None:
    """Scales a view; of rows the plain operator does in 0.8 times the time, but slowly if types are mixed."""
    is_mixed = x.dtype != factor.dtype
    if x.dim() == 2:  # noqa: PLR2004
        if not is_mixed:
            torch.addcmul(addend, x, factor, out=into)
            return
        x, into = _image(x), _image(into)
    elif not is_mixed and x.shape[2:].numel() <= SHORT_PLANE:
        torch.mul(x, _alongside(factor, x), out=into).add_(_alongside(addend, x))
        return
    mean, variance = _zero_and_one(factor.shape, factor.dtype)
    training, rest, unused = False, 0.0, factor.new_empty(0)
    _normalise(x, factor, addend, mean, variance, training, rest, rest, out=into, save_mean=unused, save_invstd=unused)


def _view(x: Tensor) -> Tensor:
    """Returns a dense `x` as rows, several beside each other where channels are few, or else as it is."""
    rows = _rows(x)
    if rows is None:
        return x
    number, channels = rows.shape
    beside = COLUMNS // channels
    return rows if beside <= 1 else rows.view(-1, math.gcd(number, beside) * channels)


def _views(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the view of each of some tensors that lie alike."""
    return tensors if _rows(tensors[0]) is None else tuple(_view(tensor) for tensor in tensors)


def _vectors(view: Tensor, *vectors: FloatArray) -> Iterator[Tensor]:
    """Yields vectors of shape (C,) in the compute type, repeated as the view has it."""
    dtype = np.float64 if view.dtype == torch.float64 else np.float32
    for vector in vectors:
        if view.shape[1] == len(vector):
            yield torch.from_numpy(vector.astype(dtype))
            continue
        repeated = np.empty((view.shape[1] // len(vector), len(vector)), dtype)
        repeated[:] = vector
        yield torch.from_numpy(repeated.reshape(-1))


def _alongside(vector: Tensor, view: Tensor) -> Tensor:
    dimensions = view.dim()
    return vector if dimensions == 2 else vector.view(-1, *[1] * (dimensions - 2))  # noqa: PLR2004


def _step(size: int, view: Tensor) -> int:
    """Returns how many rows or samples make a block, in which each thread has `size` elements."""
    length = view.numel() // view.shape[0]
    return max(1, size * min(torch.get_num_threads(), THREADS) // length)


def _blocks(size: int, *views: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the views in parts of about `size` elements per thread."""
    step = _step(size, views[0])
    number = views[0].shape[0]
    if step >= number:
        yield views
        return
    for start in range(0, number, step):
        yield tuple(view[start : start + step] for view in views)


def _plane(x: Tensor) -> int:
    """Returns how many values each plane of `x` has, long ones being cut."""
    length = x.numel() // (x.shape[0] * x.shape[1])
    while length > LONG_PLANE and length % 2 == 0:
        length //= 2
    return length


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(x: Tensor) -> Tensor | None:
    """Returns a dense `x` as (R, C) if its channels lie last, without a copy."""
    if x.dim() == 2:  # noqa: PLR2004
        return x
    return x.movedim(1, -1).reshape(-1, x.shape[1]) if x.stride(1) == 1 else None


def _image(rows: Tensor) -> Tensor:
    """Returns (R, C) as the image (1, C, R, 1) in channels_last, which torch's kernels are fast on."""
    return rows.t().unsqueeze(0).unsqueeze(-1)
