"""The kernels' way on a CPU: torch's vectorised batch-norm operators, fed with our statistics.

What torch's own layer spends on a CPU goes mostly into reductions that are not vectorised. Its other operators are:
its group norm takes the moments of a plane in one stable pass, and the reduction of its batch norm's backward takes
Σg and Σg·(x - center) in one. Elementwise work goes through its eval mode, `x*factor + addend`, in blocks that
stay in the cache where more than one operator works on them.

Every function wants a dense tensor, as `kernels.laid_out` returns it, and sees it in one of two shapes: planes (N, C, L)
of a contiguous one, or rows (R, C) of one whose channels lie last.
"""

import torch
from torch import Tensor

_normalise = torch.ops.aten.native_batch_norm.out
_reduce = torch.ops.aten.native_batch_norm_backward
_moments_of_planes = torch.ops.aten.native_group_norm

# Elements that pass through several operators at a time: 4 MB of float32, which the caches of two cores hold. Whole
# tensors of 25 MB took 1.2 times as long, and up to twice where others use the cache.
BLOCK = 2**20

# Rows are added one by one in float32, so that many of them would lose digits: they are dealt to this many columns,
# whose sums are added in float64.
COLUMNS = 4096

# A plane longer than this is left to others, for the same reason: its values are added in 16 columns only.
LONGEST_PLANE = 2**16

# How large mean² / variance may be for moments of values that are not centred. The means of planes are rounded to
# float32, which at 16 standard deviations is 10^-6 of one; the variance from products of rows is off by mean² / variance
# roundings.
NEAR_FOR_PLANES, NEAR_FOR_ROWS = 256.0, 8.0


def takes(x: Tensor) -> bool:
    """Whether `x`, dense or not, may come here."""
    return x.device.type == "cpu" and x.numel() > 0 and (x.dim() < 3 or x[0, 0].numel() <= LONGEST_PLANE)  # noqa: PLR2004


def moments(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the mean and Σ(x - mean)², each of shape (C,), float64; None where only centred values would give them."""
    rows = _rows(x)
    mean, squares = _moments_of_contiguous(x) if rows is None else _moments_of_rows(rows)
    near = NEAR_FOR_PLANES if rows is None else NEAR_FOR_ROWS
    number = x.numel() // x.shape[1]
    return (mean, squares) if bool((number * mean * mean <= near * squares).all()) else None


def _moments_of_contiguous(x: Tensor) -> tuple[Tensor, Tensor]:
    """Those of planes, merged in float64 (Chan, Golub & LeVeque)."""
    channels, length = x.shape[1], x[0, 0].numel()
    one = torch.ones(channels, dtype=_wide(x))  # without it half precision would round the moments to itself
    found = [
        _moments_of_planes(block, one, None, len(block), channels, length, channels, 0.0)[1:] for block in _blocks(x)
    ]
    means, deviations = (torch.cat(parts).double() for parts in zip(*found, strict=True))
    mean = means.mean(0)
    squares = deviations.pow_(-2).sum(0) + (means - mean).square_().sum(0)
    return mean, squares.mul_(length)


def _moments_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """From products with values that are centred near the mean, in one pass."""
    pivot = rows[:16].to(_wide(rows)).mean(0)
    first, second = _sums_of_rows(rows, rows, pivot)
    mean = first / len(rows)
    return mean, second - first * (mean - pivot)


def sums(grad: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Σg and Σg·(x - center), each of shape (C,), float64.

    Args:
        grad: g, of the type and layout of `x`.
        x: shape (N, C, *).
        center: shape (C,), in the compute type.
    """
    grad_rows, rows = _rows(grad), _rows(x)
    return _sums(grad, x, center) if grad_rows is None or rows is None else _sums_of_rows(grad_rows, rows, center)


def _sums_of_rows(grad: Tensor, rows: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    number, channels = rows.shape
    fold = max(1, min(COLUMNS // channels, number))
    even = number // fold * fold
    parts = [_sums(*(_image(part[:even].view(-1, fold * channels)) for part in (grad, rows)), center.repeat(fold))]
    if even < number:
        parts.append(_sums(_image(grad[even:]), _image(rows[even:]), center))
    first, second = (torch.cat([part.view(-1, channels) for part in vectors]) for vectors in zip(*parts, strict=True))
    return first.sum(0), second.sum(0)


def _sums(grad: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    one = torch.ones_like(center)
    _, second, first = _reduce(grad, x, None, None, None, center, one, True, 0.0, [False, True, True])
    return first.double(), second.double()


def scale(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """Returns x * factor + addend, rounded to the type of `x` once; vectors of shape (C,), in the compute type."""
    output = torch.empty_like(x)
    _scale(_block(x), factor, addend, _block(output))
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
    by_grad = by_grad.view(1, -1, *[1] * (_block(x).dim() - 2))
    scratch: list[Tensor] = []
    for block, grad_block, into in zip(_blocks(x), _blocks(grad), _blocks(output), strict=True):
        if x.dtype == by_grad.dtype:
            _scale(block, factor, addend, into)
            into.addcmul_(grad_block, by_grad)
            continue
        scratch = scratch or [torch.empty_like(block, dtype=by_grad.dtype) for _ in range(2)]
        wide, wide_grad = (_like(each, block).copy_(part) for each, part in zip(scratch, (block, grad_block), strict=True))
        _scale(wide, factor, addend, wide)
        into.copy_(wide.addcmul_(wide_grad, by_grad))
    return output


def _like(scratch: Tensor, block: Tensor) -> Tensor:
    """The last block may be smaller."""
    return scratch if scratch.shape == block.shape else torch.empty_like(block, dtype=scratch.dtype)


def _scale(x: Tensor, factor: Tensor, addend: Tensor, into: Tensor) -> None:
    mean, variance, unused = torch.zeros_like(factor), torch.ones_like(factor), factor.new_empty(0)
    _normalise(x, factor, addend, mean, variance, False, 0.0, 0.0, out=into, save_mean=unused, save_invstd=unused)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(x: Tensor) -> Tensor | None:
    """Returns a dense `x` as (R, C) if its channels lie last, without a copy."""
    last = x.movedim(1, -1)
    return last.reshape(-1, x.shape[1]) if last.is_contiguous() else None


def _image(rows: Tensor) -> Tensor:
    """Returns (R, C) as the image (1, C, R, 1) in channels_last, which torch's kernels are fast on."""
    return rows.t().unsqueeze(0).unsqueeze(-1)


def _block(x: Tensor) -> Tensor:
    rows = _rows(x)
    return x if rows is None else _image(rows)


def _blocks(x: Tensor) -> list[Tensor]:
    """Returns `x` in parts of about `BLOCK` elements."""
    rows = _rows(x)
    if rows is None:
        return list(x.split(max(1, BLOCK // x[0].numel())))
    return [_image(part) for part in rows.split(max(1, BLOCK // rows.shape[1]))]
