"""The kernels' way on a CPU: torch's vectorised batch-norm operators, fed with our statistics.

What torch's own layer spends on a CPU goes mostly into reductions that are slow. Other operators of torch take
the same sums at the speed of memory: that of its group norm's backward takes Σg and Σg·x of each plane in one pass, and
that of its batch norm's backward, where channels lie last, of each channel. Elementwise work goes through its eval mode, `x*factor + addend`, in blocks that
stay in the cache where more than one operator works on them.

Every function wants a dense tensor, as `kernels.laid_out` returns it, and sees it in one of two shapes: planes (N, C, L)
of a contiguous one, or rows (R, C) of one whose channels lie last.
"""

import math

import torch
from torch import Tensor

_normalise = torch.ops.aten.native_batch_norm.out
_reduce_planes = torch.ops.aten.native_group_norm_backward
_reduce_rows = torch.ops.aten.native_batch_norm_backward

# Elements that pass through several operators at a time: 4 MB of float32, which the caches of two cores hold. Whole
# tensors of 25 MB took 1.2 times as long, and up to twice where others use the cache.
BLOCK = 2**20
WIDENED_BLOCK = 2**19

# The operators add in float32, a plane in 16 columns and rows one by one, so that many of them would lose digits. Longer
# planes are cut, rows are dealt to more columns, and all these partial sums are added in float64. Planes that cannot
# be cut below the second length are left to others.
LONG_PLANE, LONGEST_PLANE = 2**14, 2**16
COLUMNS = 1024

# Sums of squares that are not centred cost the variance (1 + 2 mean² / variance) roundings. Up to this ratio that is no
# more than centring costs, and half the time; beyond it the values must be centred first.
NEAR = 4.0


def takes(x: Tensor) -> bool:
    """Whether `x`, dense or not, may come here."""
    return x.device.type == "cpu" and x.numel() > 0 and (x.dim() < 3 or _plane(x) <= LONGEST_PLANE)  # noqa: PLR2004


def moments(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the mean and Σ(x - mean)², each of shape (C,), float64; None where only centred values would give them."""
    number = x.numel() // x.shape[1]
    first, second = sums(x, x)
    mean = first / number
    squares = second - first * mean
    return (mean, squares) if bool((first * mean <= NEAR * squares).all()) else None


def sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Σg and Σg·x, each of shape (C,), float64; `grad`, g, is of the type and layout of `x`."""
    rows = _rows(x)
    if rows is not None:
        grad_rows = rows if grad is x else _rows(grad)
        assert grad_rows is not None  # noqa: S101 - they lie alike
        return _sums_of_rows(grad_rows, rows)
    length = _plane(x)
    planes = x.numel() // length
    one, zero = x.new_ones(planes, dtype=_wide(x)), x.new_zeros((1, 1), dtype=_wide(x))
    # Each plane as a channel of one group whose mean is 0 and deviation 1: the gradients of its affine part.
    _, second, first = _reduce_planes(grad, x, zero, one[:1].view(1, 1), one, 1, planes, length, 1, [False, True, True])
    by_channel = len(x), x.shape[1], -1
    return first.view(by_channel).sum((0, 2), dtype=torch.float64), second.view(by_channel).sum(
        (0, 2), dtype=torch.float64
    )


def _sums_of_rows(grad: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    number, channels = rows.shape
    fold = max(1, min(COLUMNS // channels, number))
    even = number // fold * fold
    first, second = _sums_of_columns(grad[:even].view(-1, fold * channels), rows[:even].view(-1, fold * channels))
    first, second = first.view(fold, channels).sum(0), second.view(fold, channels).sum(0)
    if even < number:
        rest = _sums_of_columns(grad[even:], rows[even:])
        first, second = first + rest[0], second + rest[1]
    return first, second


def _sums_of_columns(grad: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    one = rows.new_ones(rows.shape[1], dtype=_wide(rows))
    _, second, first = _reduce_rows(
        _image(grad), _image(rows), None, None, None, torch.zeros_like(one), one, True, 0.0, [False, True, True]
    )
    return first.double(), second.double()


def scale(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """Returns x * factor + addend, rounded to the type of `x` once; vectors of shape (C,), in the compute type."""
    output = torch.empty_like(x)
    (view, into), (factor, addend) = _views(x, output), _folded(x, factor, addend)
    _scale(view, factor, addend, into)
    return output


def combine(grad: Tensor, by_grad: Tensor, x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """Returns g * by_grad + x * factor + addend, rounded to the type of `x` once.

    Args:
        grad: g, of the type and layout of `x`.
        by_grad: shape (C,), in the compute type, as the other vectors.
        x: shape (N, C, *).
        factor: shape (C,).
        addend: shape (C,).
    """
    output = torch.empty_like(x)
    views, (by_grad, factor, addend) = _views(grad, x, output), _folded(x, by_grad, factor, addend)
    by_grad = by_grad.view(1, -1, *[1] * (views[0].dim() - 2))
    size = BLOCK if x.dtype == factor.dtype else WIDENED_BLOCK
    parts = zip(*(view.split(max(1, size // view[0].numel())) for view in views), strict=True)
    if x.dtype == factor.dtype:
        for grad_part, part, into in parts:
            _scale(part, factor, addend, into)
            into.addcmul_(grad_part, by_grad)
        return output
    wide, wide_grad = scratch = torch.empty((2, 0), dtype=factor.dtype)
    for grad_part, part, into in parts:
        if wide.shape != part.shape:
            wide, wide_grad = (torch.empty_like(part, dtype=factor.dtype) for _ in scratch)
        _scale(wide.copy_(part), factor, addend, wide)
        into.copy_(wide.addcmul_(wide_grad.copy_(grad_part), by_grad))
    return output


def _scale(x: Tensor, factor: Tensor, addend: Tensor, into: Tensor) -> None:
    """On views; with rows the plain operator takes a third of the time, but only if all is of one type."""
    if x.dim() == 2 and x.dtype == factor.dtype:  # noqa: PLR2004
        torch.addcmul(addend, x, factor, out=into)
        return
    if x.dim() == 2:  # noqa: PLR2004
        x, into = _image(x), _image(into)
    mean, variance, unused = torch.zeros_like(factor), torch.ones_like(factor), factor.new_empty(0)
    _normalise(x, factor, addend, mean, variance, False, 0.0, 0.0, out=into, save_mean=unused, save_invstd=unused)


def _views(*tensors: Tensor) -> list[Tensor]:
    """Returns dense tensors that lie alike as rows, several beside each other where channels are few, or planes."""
    rows = [_rows(tensor) for tensor in tensors]
    return [x if part is None else part.view(-1, _fold(x) * x.shape[1]) for x, part in zip(tensors, rows, strict=True)]


def _folded(x: Tensor, *vectors: Tensor) -> list[Tensor]:
    """Returns vectors of shape (C,) repeated for the views of `x`."""
    fold = 1 if _rows(x) is None else _fold(x)
    return [vector if fold == 1 else vector.repeat(fold) for vector in vectors]


def _fold(x: Tensor) -> int:
    """Returns how many rows of a dense `x` make one of its views."""
    return math.gcd(x.numel() // x.shape[1], max(1, COLUMNS // x.shape[1]))


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
    last = x.movedim(1, -1)
    return last.reshape(-1, x.shape[1]) if last.is_contiguous() else None


def _image(rows: Tensor) -> Tensor:
    """Returns (R, C) as the image (1, C, R, 1) in channels_last, which torch's kernels are fast on."""
    return rows.t().unsqueeze(0).unsqueeze(-1)
