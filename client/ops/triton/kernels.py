"""The kernels, in Triton's language.

An input is read as a contiguous (N, C, S). An (N, C, H, W) input has S = H * W if it is contiguous; in channels_last
memory it is read as (N * H * W, C, 1). So both layouts share all kernels.

All buffers are float64. A pass has its own buffer and a buffer for its round, with these parts in order:

    forward   count, mean, invstd, slope, center, scale, shift, row
    backward  by_centred, constant, by_gradient, row
    round     rows of all ranks, flags

A row, which is sent to the other ranks, has the round's digest (as the bits of a float64), the count, and two vectors:
Σx and Σx² forward, Σdy and Σdy·(x - mean) backward. `center`, `scale`, `shift` and the three vectors of a backward pass
are rounded to float32: y = (x - center) * scale + shift, dx = by_gradient * dy + by_centred * (x - center) + constant.

`finish` and `finish_backward` compute all values that must be bit-identical on all ranks, including ranks with torch's
operators. They add in rank order, not across threads, and keep the order of operations of `client.ops.statistics`;
`OPTIONS` keeps Triton from fusing multiplications and additions.
"""

import triton
import triton.language as tl

# Options of every launch. Triton 3.6 fuses a * b + c by default, Triton 3.9 only on request.
OPTIONS = {"enable_fp_fusion": False}

# Arguments that Triton must not specialize on: otherwise it would compile the kernels again for a smaller last batch.
COUNTS = ["N", "steps", "splits", "ranks"]


@triton.jit
def _tile(t, N, C, S, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, CHANNEL_AXIS: tl.constexpr):
    """Offsets and mask of tile `t` of this program's channels, both of shape (BLOCK_N, BLOCK_C, BLOCK_S)."""
    across = tl.cdiv(S, BLOCK_S)
    n = (t // across) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None, None]
    c = tl.program_id(CHANNEL_AXIS) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :, None]
    s = (t % across) * BLOCK_S + tl.arange(0, BLOCK_S)[None, None, :]
    # In this order every product has 64 bits.
    offsets = (n.to(tl.int64) * C + c) * S + s
    return offsets, (n < N) & (c < C) & (s < S)


@triton.jit
def _per_channel(values):
    """Sum of a tile per channel, shape (BLOCK_C,)."""
    return tl.sum(tl.sum(values, 2), 0)


@triton.jit
def _channels(block, C, BLOCK: tl.constexpr):
    """A block of channels, and which of them exist."""
    channels = block * BLOCK + tl.arange(0, BLOCK)
    return channels, channels < C


@triton.jit
def _vector(pointer, channels, there):
    return tl.load(pointer + channels, mask=there, other=0.0)


@triton.jit
def _parameter(pointer, channels, there):
    """A weight or bias as float64, rounded to float32 first, the type in which torch computes."""
    return tl.load(pointer + channels, mask=there, other=0.0).to(tl.float32).to(tl.float64)


@triton.jit
def _store(pointers, values, mask):
    """Store in the type of `pointers`, rounded to float32 first, as torch rounds float64 to 16 bits."""
    tl.store(pointers, values.to(tl.float32).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _write_row(row, forward, digest, count, channels, there, C, center, first, second):
    """Write the row of a round from the sums about `center`, which is the center of `forward` in a backward round."""
    if forward is None:
        at_least_one = tl.where(count > 0, count, 1.0)
        mean = center + first / at_least_one
        centred = second - first * first / at_least_one
        centred = tl.where(centred < 0, 0.0, centred)  # `tl.maximum` would lose NaN
        first, second = count * mean, centred + count * mean * mean
    else:
        rest = _vector(forward + 1, channels, there) - center
        second = second - rest * first
    if tl.program_id(0) == 0:
        tl.store(row, digest.to(tl.int64).to(tl.float64, bitcast=True))
        tl.store(row + 1, count)
    tl.store(row + 2 + channels, first, mask=there)
    tl.store(row + 2 + C + channels, second, mask=there)


@triton.jit(do_not_specialize=["digest", *COUNTS])
def sums(dy, x, forward, partial, row, N, C, S, steps, digest: tl.int64, count: tl.float64, WRITES_ROW: tl.constexpr,
         BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Sum x - K and (x - K)², or in a backward pass dy and dy·(x - K), over one split of one block of channels.

    In a backward pass K is the center of `forward`. In a forward pass, where `dy` and `forward` are None, K is the mean
    of a channel's first tile, which each program of the channel reads. If the tile has m of all n values, K is within
    √(n / m) standard deviations of the mean for all inputs; so float32 is enough at any mean.

    `partial`, shape (1 + 2 * splits, C), receives K, then both sums of each split. `WRITES_ROW`: there is one split, so
    this kernel writes the row itself, and `partial` is unused. A CUDA graph replays the `digest` of its capture; all
    ranks replay the same one.
    """
    split = tl.program_id(1)
    channels, there = _channels(tl.program_id(0), C, BLOCK_C)
    if dy is None:
        at, inside = _tile(0, N, C, S, BLOCK_N, BLOCK_C, BLOCK_S, 0)
        sample = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        center = _per_channel(sample) / tl.maximum(_per_channel(inside.to(tl.float32)), 1.0)
        # Around an infinite center the mean would be NaN; around 0 it is infinite.
        center = tl.where(tl.abs(center) < float("inf"), center, 0.0)
    else:
        center = _vector(forward + 1 + 3 * C, channels, there).to(tl.float32)
    first = tl.zeros((BLOCK_N, BLOCK_C, BLOCK_S), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_C, BLOCK_S), tl.float32)
    tiles = tl.cdiv(N, BLOCK_N) * tl.cdiv(S, BLOCK_S)
    for t in range(split * steps, tl.minimum((split + 1) * steps, tiles)):
        offsets, mask = _tile(t, N, C, S, BLOCK_N, BLOCK_C, BLOCK_S, 0)
        values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        values = tl.where(mask, values - center[None, :, None], 0.0)
        if dy is None:
            first += values
            second += values * values
        else:
            gradient = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
            first += gradient
            second += gradient * values
    about = center.to(tl.float64)
    sum_of_first, sum_of_second = _per_channel(first.to(tl.float64)), _per_channel(second.to(tl.float64))
    if WRITES_ROW:
        number = tl.full((), count, tl.float64)
        _write_row(row, forward, digest, number, channels, there, C, about, sum_of_first, sum_of_second)
    else:
        own = partial + C + split * 2 * C + channels
        tl.store(own, sum_of_first, mask=there)
        tl.store(own + C, sum_of_second, mask=there)
        if split == 0:
            tl.store(partial + channels, about, mask=there)


@triton.jit(do_not_specialize=["digest", *COUNTS])
def write_row(partial, forward, row, C, splits, digest: tl.int64, count: tl.float64,
              AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the row of a round from the sums of several splits, added in a fixed order."""
    channels, there = _channels(tl.program_id(0), C, BLOCK)
    first = tl.zeros((AT_ONCE, BLOCK), tl.float64)
    second = tl.zeros((AT_ONCE, BLOCK), tl.float64)
    for start in range(0, splits, AT_ONCE):
        split = (start + tl.arange(0, AT_ONCE))[:, None]
        own = partial + C + split * 2 * C + channels[None, :]
        mask = (split < splits) & there[None, :]
        first += tl.load(own, mask=mask, other=0.0)
        second += tl.load(own + C, mask=mask, other=0.0)
    center, number = _vector(partial, channels, there), tl.full((), count, tl.float64)
    _write_row(row, forward, digest, number, channels, there, C, center, tl.sum(first, 0), tl.sum(second, 0))


@triton.jit
def _total(rows, flags, ranks, digest, block, C, BLOCK: tl.constexpr):
    """Sum of all rows, from first to last, and the number of rows of another round; writes this block's flags."""
    channels, there = _channels(block, C, BLOCK)
    count, others = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    first, second = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for rank in range(ranks):
        row = rows + rank * (2 * C + 2)
        its_first, its_second = _vector(row + 2, channels, there), _vector(row + 2 + C, channels, there)
        is_other = (tl.load(row).to(tl.int64, bitcast=True) != digest.to(tl.int64)).to(tl.int32)
        finite = (tl.abs(its_first) < float("inf")) & (tl.abs(its_second) < float("inf"))
        not_finite = 1 - tl.min(finite.to(tl.int32), 0)
        tl.store(flags + rank * tl.cdiv(C, BLOCK) + block, (is_other + 2 * not_finite).to(tl.float64))
        count += tl.load(row + 1)
        others += is_other
        # The sum begins with the first row, not with 0: 0 + -0 is not -0.
        first = tl.where(rank == 0, its_first, first + its_first)
        second = tl.where(rank == 0, its_second, second + its_second)
    return count, first, second, others


@triton.jit
def _move(running, newest, momentum, moves, channels, there):
    """Update a running statistic, bit-identical to CUDA's `lerp` in float32."""
    old = tl.load(running + channels, mask=there, other=0.0).to(tl.float32)
    target = newest.to(tl.float32)
    share = tl.full((), momentum, tl.float64).to(tl.float32) + tl.zeros_like(old)
    near = tl.fma(share, target - old, old)
    moved = tl.where(tl.abs(share) < 0.5, near, tl.fma(old - target, 1 - share, target))
    _store(running + channels, tl.where(moves, moved, old), there)


@triton.jit(do_not_specialize=["digest", *COUNTS],
            do_not_specialize_on_alignment=["weight", "bias", "running_mean", "running_var", "tracked"])  # fmt: skip
def finish(work, rows, weight, bias, running_mean, running_var, tracked, C, ranks, digest: tl.int64,
           eps: tl.float64, momentum: tl.float64, CLAMP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute the statistics from all rows, and update the running statistics.

    A failed round gives NaN and updates no running statistics. An empty batch only increments `tracked`.
    The flags follow `rows`, see `client.ops.device_errors`: one per row and block of channels, then one per block for
    too few values. Each program writes all flags of its block, so they need not be set to 0 first.
    """
    block = tl.program_id(0)
    channels, there = _channels(block, C, BLOCK)
    flags = rows + ranks * (2 * C + 2)
    count, first, second, others = _total(rows, flags, ranks, digest, block, C, BLOCK)
    is_too_few = count == 1
    tl.store(flags + ranks * tl.cdiv(C, BLOCK) + block, 4 * is_too_few.to(tl.float64))
    count = tl.where((others > 0) | is_too_few, float("nan"), count)
    at_least_one = tl.where(count < 1, 1.0, count)  # NaN stays
    mean = first / at_least_one
    centred = second - first * first / at_least_one
    centred = tl.where(centred < 0, 0.0, centred)
    variance = centred / at_least_one
    if CLAMP:
        slope = (variance >= eps).to(tl.float64)
        bounded = tl.where(variance < eps, eps, variance)
    else:
        slope = tl.full((BLOCK,), 1.0, tl.float64)
        bounded = variance + eps
    invstd = tl.where(count == 0, 0.0, 1.0 / tl.sqrt(bounded))
    tl.store(work + 1 + channels, mean, mask=there)
    tl.store(work + 1 + C + channels, invstd, mask=there)
    tl.store(work + 1 + 2 * C + channels, slope, mask=there)
    # In float32 the mean has a relative error of up to 2^-24; `shift` corrects it.
    center = mean.to(tl.float32).to(tl.float64)
    scale, shift = invstd, (center - mean) * invstd
    if weight is not None:
        factor = _parameter(weight, channels, there)
        scale, shift = scale * factor, shift * factor
    if bias is not None:
        shift += _parameter(bias, channels, there)
    tl.store(work + 1 + 3 * C + channels, center, mask=there)
    tl.store(work + 1 + 4 * C + channels, scale.to(tl.float32).to(tl.float64), mask=there)
    tl.store(work + 1 + 5 * C + channels, shift.to(tl.float32).to(tl.float64), mask=there)
    if running_mean is not None:
        _move(running_mean, mean, momentum, count > 1, channels, there)
        _move(running_var, centred / (at_least_one - 1), momentum, count > 1, channels, there)
    if block == 0:
        tl.store(work, count)
        if tracked is not None:
            tl.store(tracked, tl.load(tracked) + (count == count).to(tl.int64))


@triton.jit(do_not_specialize=["digest", *COUNTS], do_not_specialize_on_alignment=["weight"])
def finish_backward(forward, work, rows, weight, weight_gradient, bias_gradient, C, ranks, digest: tl.int64,
                    HAS_ROUND: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute the factors of the input's gradient from all rows, and this rank's gradients of weight and bias.

    `HAS_ROUND`: whether the input needs a gradient, which depends on the rows of all ranks.
    """
    block = tl.program_id(0)
    channels, there = _channels(block, C, BLOCK)
    row = work + 3 * C
    invstd = _vector(forward + 1 + C, channels, there)
    if HAS_ROUND:
        _, first, second, others = _total(rows, rows + ranks * (2 * C + 2), ranks, digest, block, C, BLOCK)
        count = tl.where(others > 0, float("nan"), tl.load(forward))
        at_least_one = tl.where(count < 1, 1.0, count)
        first, second = first / at_least_one, second / at_least_one
        mean = _vector(forward + 1, channels, there)
        slope = _vector(forward + 1 + 2 * C, channels, there)
        by_gradient = invstd
        if weight is not None:
            by_gradient *= _parameter(weight, channels, there)
        by_centred = -by_gradient * (invstd * invstd * slope * second)
        rest = mean - _vector(forward + 1 + 3 * C, channels, there)
        constant = -by_gradient * first - by_centred * rest
        tl.store(work + channels, by_centred.to(tl.float32).to(tl.float64), mask=there)
        tl.store(work + C + channels, constant.to(tl.float32).to(tl.float64), mask=there)
        tl.store(work + 2 * C + channels, by_gradient.to(tl.float32).to(tl.float64), mask=there)
    if bias_gradient is not None:
        _store(bias_gradient + channels, _vector(row + 2, channels, there), there)
    if weight_gradient is not None:
        _store(weight_gradient + channels, _vector(row + 2 + C, channels, there) * invstd, there)


@triton.jit(do_not_specialize=COUNTS)
def affine(dy, x, y, forward, work, N, C, S, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Write one tile of one block of channels: of the output, or, given `dy`, of the input's gradient.

    `y` has the type and layout of `x`. `work` is the pass's buffer; in a forward pass `forward` is the same buffer.
    """
    channels, there = _channels(tl.program_id(1), C, BLOCK_C)
    vectors = work
    if dy is None:
        vectors += 1 + 4 * C
    center = _vector(forward + 1 + 3 * C, channels, there).to(tl.float32)
    scale = _vector(vectors, channels, there).to(tl.float32)
    shift = _vector(vectors + C, channels, there).to(tl.float32)
    offsets, mask = _tile(tl.program_id(0), N, C, S, BLOCK_N, BLOCK_C, BLOCK_S, 1)
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - center[None, :, None]
    values = values * scale[None, :, None] + shift[None, :, None]
    if dy is not None:
        by_gradient = _vector(vectors + 2 * C, channels, there).to(tl.float32)
        values += tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32) * by_gradient[None, :, None]
    _store(y + offsets, values, mask)
