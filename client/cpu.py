"""The kernels' way on a CPU: torch's vectorised operators, fed with our statistics.

What torch's own layer spends on a CPU goes mostly into reductions that are slow. Other operators of torch take the same
sums at the speed of memory: that of its group norm's backward takes Σg and Σg·x of each plane in one pass, and that of
its batch norm's backward, where channels lie last, of each channel. Elementwise work goes through eval mode,
`x*factor + addend`, in blocks that stay in the cache where more than one operator works on them.

Every function wants dense tensors, as `kernels.laid_out` returns them, and sees them in one of two shapes: planes
(N, C, *) of a contiguous one, or rows (R, C) of one whose channels lie last.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from statsd_bn.reduction import FloatArray, sum_in_order

_normalise = torch.ops.aten.native_batch_norm.out
_reduce_planes = torch.ops.aten.native_group_norm_backward.default
_reduce_rows = torch.ops.aten.native_batch_norm_backward.default

# Which of their three results the two reductions compute: not the gradient of the input.
_REDUCTIONS = [False, True, True]

# Elements that pass through several operators at a time: 4 MB of float32, which the caches of two cores hold. Whole
# tensors of 25 MB took 1.2 times as long, and up to twice where others use the cache. Half precision needs
# twice the room while it is widened.
BLOCK, WIDENED_BLOCK = 2**20, 2**19

# The reductions add in float32, a plane in 16 columns and rows one by one, so that many values would lose digits. So
# long planes are cut, rows are dealt to more columns and into parts, and all these sums are added in float64. Planes
# that cannot be cut below the second length are left to others.
LONG_PLANE, LONGEST_PLANE = 2**13, 2**16
COLUMNS, ROWS = 1024, 1024

# Sums of squares that are not centred cost the variance (1 + 2 mean² / variance) roundings. Up to this ratio that is no
# more than centring costs, and half the time; beyond it the values must be centred first.
NEAR = 4.0

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
    return x.device.type == "cpu" and x.numel() > 0 and (x.dim() < 3 or _plane(x) <= LONGEST_PLANE)  # noqa: PLR2004


def moments(x: Tensor) -> tuple[FloatArray, FloatArray] | None:
    """Returns the mean and Σ(x - mean)², each of shape (C,); None where the values must be centred for that."""
    first, second = sums(x, x)
    with np.errstate(all="ignore"):  # neither infinity nor NaN is near
        mean = first / (x.numel() // x.shape[1])
        squares = second - first * mean
        return (mean, squares) if (first * mean <= NEAR * squares).all() else None


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
    length = _plane(x)
    planes = x.numel() // length
    one = x.new_ones(planes, dtype=_wide(x))
    mean, deviation = one.new_zeros((1, 1)), one[:1].view(1, 1)
    _, second, first = _reduce_planes(grad, x, mean, deviation, one, 1, planes, length, 1, _REDUCTIONS)
    by_channel = np.stack((first.numpy(), second.numpy())).reshape(2, len(x), x.shape[1], -1)
    found: FloatArray = by_channel.sum((1, 3), dtype=np.float64)
    return found


def _sums_of_rows(grad: Tensor, rows: Tensor) -> FloatArray:
    number, channels = rows.shape
    fold = max(1, min(COLUMNS // channels, number))
    even = number // fold * fold
    columns = fold * channels
    parts = _blocks(ROWS * columns, *(part[:even].view(-1, columns) for part in (grad, rows)))
    dealt = sum_in_order(_sums_of_columns(*part) for part in parts)
    found: FloatArray = dealt.reshape(2, fold, channels).sum(1)
    return found if even == number else found + _sums_of_columns(grad[even:], rows[even:])


def _sums_of_columns(grad: Tensor, rows: Tensor) -> FloatArray:
    one, zero = rows.new_ones(rows.shape[1], dtype=_wide(rows)), rows.new_zeros(rows.shape[1], dtype=_wide(rows))
    _, second, first = _reduce_rows(
        _image(grad), _image(rows), None, None, None, zero, one, train=True, eps=0.0, output_mask=_REDUCTIONS
    )
    return np.stack((first.numpy(), second.numpy()), dtype=np.float64)


def scale(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """Returns x * factor + addend, rounded to the type of `x` once; vectors of shape (C,), in the compute type."""
    output = _fresh(x)
    view = _view(x)
    factor, addend = _folded(view, factor, addend)
    _scale(view, factor, addend, _view(output))
    return output


def combine(grad: Tensor, x: Tensor, by_grad: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """Returns g * by_grad + x * factor + addend, rounded to the type of `x` once.

    Args:
        grad: g, of the type and layout of `x`.
        x: shape (N, C, *).
        by_grad: shape (C,), in the compute type, as the other vectors.
        factor: shape (C,).
        addend: shape (C,).
    """
    output = _fresh(x)
    views = _view(grad), _view(x), _view(output)
    by_grad, factor, addend = _folded(views[1], by_grad, factor, addend)
    by_grad = by_grad.view(1, -1, *[1] * (views[1].dim() - 2))
    if x.dtype == factor.dtype:
        for grad_part, part, into in _blocks(BLOCK, *views):
            _scale(part, factor, addend, into)
            into.addcmul_(grad_part, by_grad)
        return output
    for grad_part, part, into in _blocks(WIDENED_BLOCK, *views):
        wide = part.to(factor.dtype)
        _scale(wide, factor, addend, wide)
        into.copy_(wide.addcmul_(grad_part.to(factor.dtype), by_grad))
    return output


def _fresh(x: Tensor) -> Tensor:
    """Returns an empty tensor like `x`, on huge pages where the system gives them to those who ask, as numpy does.

    The first touch of 25 MB in pages of 4 kB takes as long as all the arithmetic on them.
    """
    output = torch.empty_like(x)
    if _madvise is not None and output.nbytes >= HUGE:
        start, end = -(-output.data_ptr() // PAGE) * PAGE, (output.data_ptr() + output.nbytes) // PAGE * PAGE
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)
    return output


def _scale(x: Tensor, factor: Tensor, addend: Tensor, into: Tensor) -> None:
    """Scales a view; of rows the plain operator does in 0.8 times the time, but slowly if types are mixed."""
    if x.dim() == 2:  # noqa: PLR2004
        if x.dtype == factor.dtype:
            torch.addcmul(addend, x, factor, out=into)
            return
        x, into = _image(x), _image(into)
    mean, variance, unused = torch.zeros_like(factor), torch.ones_like(factor), factor.new_empty(0)
    training, rest = False, 0.0
    _normalise(x, factor, addend, mean, variance, training, rest, rest, out=into, save_mean=unused, save_invstd=unused)


def _view(x: Tensor) -> Tensor:
    """Returns a dense `x` as rows, several beside each other where channels are few, or else as it is."""
    rows = _rows(x)
    if rows is None:
        return x
    number, channels = rows.shape
    return rows.view(-1, math.gcd(number, max(1, COLUMNS // channels)) * channels)


def _folded(view: Tensor, *vectors: Tensor) -> Sequence[Tensor]:
    """Returns vectors of shape (C,), repeated as the view has it."""
    fold = view.shape[1] // len(vectors[0])
    return vectors if fold == 1 else [vector.repeat(fold) for vector in vectors]


def _blocks(size: int, *views: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the views in parts of about `size` elements."""
    step = max(1, size // views[0][0].numel())
    if step >= len(views[0]):
        yield views
        return
    for start in range(0, len(views[0]), step):
        yield tuple(view[start : start + step] for view in views)


def _plane(x: Tensor) -> int:
    """Returns how many values each plane of `x` has, long ones being cut."""
    length = x.numel() // (len(x) * x.shape[1])
    while length > LONG_PLANE and length % 2 == 0:
        length //= 2
    return length


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(x: Tensor) -> Tensor | None:
    """Returns a dense `x` as (R, C) if its channels lie last, without a copy."""
    last = x if x.dim() == 2 else x.movedim(1, -1)  # noqa: PLR2004
    return last.reshape(-1, x.shape[1]) if last.is_contiguous() else None


def _image(rows: Tensor) -> Tensor:
    """Returns (R, C) as the image (1, C, R, 1) in channels_last, which torch's kernels are fast on."""
    return rows.t().unsqueeze(0).unsqueeze(-1)
