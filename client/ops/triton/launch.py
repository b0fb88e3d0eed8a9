"""Launches: how an input is cut into tiles, the buffers of a pass, and each kernel with its arguments.

`kernel[grid](...)` of Triton looks at each argument to find the compiled variant, which took 80 µs of a host where a
launch takes 10. So a variant is found that way once; what `kernel[grid](...)` returns is launched from then on, under a
key of ours with all that Triton compiles variants for: types, what is None, whether numbers are 1 or divisible by 16,
and whether addresses are. Numbers follow from the input's shape, so each shape has its own variants.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from client.ops.statistics import Running
from client.ops.triton import kernels

# Values in a tile; programs that fill a large GPU; most tiles that one program adds up in float32, unless the launcher
# takes no more programs.
TILE, PROGRAMS, MOST_STEPS, MOST_PROGRAMS = 4096, 1056, 64, 65535

# Channels per program of kernels over vectors, and partial sums that they add up at a time.
BLOCK, SPLITS_AT_ONCE = 128, 16

# Addresses and numbers that this divides have variants of their own.
ALIGNMENT = 16

_WORD = torch.float64


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """How an input of shape (n, c, s) is cut up: tiles of (block_n, block_c, block_s).

    Attributes:
        steps: tiles that a program of a sum adds up.
        blocks: of channels, for kernels over vectors.
        compiled: the variants of kernels that inputs of this shape use.
    """

    n: int
    c: int
    s: int
    block_n: int
    block_c: int
    block_s: int
    warps: int
    channel_blocks: int
    tiles: int
    steps: int
    splits: int
    blocks: int
    compiled: dict[Any, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the input as the kernels read it."""
        return self.n, self.c, self.s

    @property
    def tile(self) -> tuple[int, int, int]:
        """Of each dimension."""
        return self.block_n, self.block_c, self.block_s


def cut_of(x: Tensor) -> Cut:
    """Returns how to cut up a dense input."""
    return _cut(x.shape, x.is_contiguous())


@lru_cache(maxsize=4096)
def _cut(shape: tuple[int, ...], is_contiguous: bool) -> Cut:
    n, c, *positions = shape
    if 0 in shape:
        return cut(0, c, 1)
    return cut(n, c, prod(positions)) if is_contiguous else cut(n * prod(positions), c, 1)


def cut(n: int, c: int, s: int) -> Cut:
    """Returns how to cut up an input of this shape."""
    block_s = min(_power_of_2(s), 256)
    block_c = min(_power_of_2(c), max(128 // block_s, 1))
    block_n = min(_power_of_2(n), max(TILE // (block_s * block_c), 1))
    warps = min(max(block_n * block_c * block_s // 512, 1), 8)
    channel_blocks = -(-c // block_c)
    tiles = -(-n // block_n) * -(-s // block_s)
    wanted = max(-(-PROGRAMS // channel_blocks), -(-tiles // MOST_STEPS), 1)
    steps = max(-(-tiles // min(wanted, MOST_PROGRAMS)), 1)
    splits = max(-(-tiles // steps), 1)
    return Cut(n, c, s, block_n, block_c, block_s, warps, channel_blocks, tiles, steps, splits, -(-c // BLOCK))


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def fits(x: Tensor) -> bool:
    """Whether programs can be counted: tiles are numbered in 32 bits, blocks of channels in 16, values in 64."""
    channels = x.shape[1]
    return 0 < channels <= MOST_PROGRAMS and x.numel() // channels < 2**31 - 2 * TILE


def _launch(
    made: Cut, variant: tuple[Any, ...], kernel: Any, grid: tuple[int, int, int], warps: int, *arguments: Any
) -> None:
    found = made.compiled.get(variant)
    if found is None:
        found = kernel[grid](*arguments, num_warps=warps, **kernels.OPTIONS)
        if found is not None:  # the interpreter compiles nothing
            made.compiled[variant] = found
        return
    found[grid](*arguments)


def _type_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the input's device the current one, where kernels are launched."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class Pass:
    """The buffer of one pass, the row in it, and those of all ranks.

    Args:
        x: the input.
        made: how it is cut up.
        head: words before the row.
        ranks: how many bring a row.
        gathers: whether rows come from elsewhere; else this process's own is the only one.
        more_flags: words behind the flags of the rows.

    Attributes:
        work: the buffer, float64.
        row: this rank's, shape (2 * C + 2,); in the buffer.
        rows: those of all ranks, shape (ranks * (2 * C + 2),); in a buffer of their own if they come from elsewhere.
        flags: what is wrong, shape (flags,), for `finish` to write; behind the rows.
        digest: of the round; the kernels write it into the row.
    """

    __slots__ = ("_gathers", "_made", "digest", "flags", "ranks", "row", "rows", "work")

    def __init__(self, x: Tensor, made: Cut, head: int, ranks: int, *, gathers: bool, more_flags: int = 0) -> None:
        size, flags = 2 * made.c + 2, ranks * made.blocks + more_flags
        self._made, self._gathers, self.ranks, self.digest = made, gathers, ranks, 0
        own = head + size
        self.work = torch.empty(own if gathers else own + flags, dtype=_WORD, device=x.device)
        self.row, behind = self.work[head:own], self.work[head:]
        shared = torch.empty(ranks * size + flags, dtype=_WORD, device=x.device) if gathers else behind
        self.rows, self.flags = shared.split_with_sizes([ranks * size, flags])

    @property
    def count(self) -> int:
        """This rank's values per channel."""
        return self._made.n * self._made.s

    @property
    def blocks(self) -> int:
        """Blocks of channels; each writes flags of its own."""
        return self._made.blocks

    def let_go(self) -> None:
        """Lets go of rows and flags, which grow with the ranks: a forward pass is kept for its backward pass."""
        del self.rows, self.flags

    def vectors(self, *numbers: int) -> tuple[Tensor, ...]:
        """Returns the vectors of these numbers, each of shape (C,), of the forward buffer: mean, invstd, slope, ..."""
        c = self._made.c
        return tuple([self.work[1 + number * c : 1 + (number + 1) * c] for number in numbers])

    def _partial(self, x: Tensor) -> Tensor:
        """Returns room for the sums of splits, or any tensor where there is one split."""
        made = self._made
        if made.splits == 1:
            return self.work
        return torch.empty((1 + 2 * made.splits) * made.c, dtype=_WORD, device=x.device)


class Forward(Pass):
    """A forward pass of a dense input; see `Pass`."""

    __slots__ = ()

    def __init__(self, x: Tensor, ranks: int, *, gathers: bool) -> None:
        made = cut_of(x)
        super().__init__(x, made, 1 + 6 * made.c, ranks, gathers=gathers, more_flags=made.blocks)

    def write_row(self, x: Tensor, digest: int) -> None:
        """Computes the row."""
        made, self.digest = self._made, digest
        variant = x.device, x.dtype, x.data_ptr() % ALIGNMENT
        partial, count = self._partial(x), float(self.count)
        grid = made.channel_blocks, made.splits, 1
        _launch(
            made, ("moments", *variant), kernels.moments, grid, made.warps,
            x, partial, self.work, *made.shape, made.steps, digest, count, made.splits == 1, *made.tile,
        )  # fmt: skip
        if made.splits > 1:
            _launch(
                made, ("write_moments", x.device), kernels.write_moments, (made.blocks, 1, 1), 4,
                partial, self.work, made.c, made.splits, digest, count, SPLITS_AT_ONCE, BLOCK,
            )  # fmt: skip

    def finish(self, weight: Tensor | None, bias: Tensor | None, running: Running, eps: float, *, clamp: bool) -> None:
        """Makes the statistics of all rows, and moves the running ones."""
        made, (mean, var, tracked, momentum) = self._made, running
        types = _type_of(weight), _type_of(bias), _type_of(mean), _type_of(var), tracked is None
        variant = "finish", self.work.device, *types, self.ranks, self._gathers, clamp
        _launch(
            made, variant, kernels.finish, (made.blocks, 1, 1), 4,
            self.work, self.rows, weight, bias, mean, var, tracked, made.c, self.ranks, self.digest,
            eps, momentum, clamp, BLOCK,
        )  # fmt: skip

    def normalise(self, x: Tensor) -> Tensor:
        """Returns the output, of the type and layout of `x`, which a checkpoint may have computed in another layout."""
        made, output = cut_of(x), torch.empty_like(x)
        if made.tiles:
            variant = "normalise", x.device, x.dtype, x.data_ptr() % ALIGNMENT
            grid = made.tiles, made.channel_blocks, 1
            _launch(
                made, variant, kernels.normalise, grid, made.warps, x, output, self.work, *made.shape, *made.tile
            )  # fmt: skip
        return output


class Backward(Pass):
    """A backward pass; see `Pass`. Gradient and input lie alike; hooks may have saved the input in another layout."""

    __slots__ = ("_forward",)

    def __init__(self, forward: Forward, x: Tensor, *, gathers: bool) -> None:
        made = cut_of(x)
        super().__init__(x, made, 3 * made.c, forward.ranks, gathers=gathers)
        self._forward = forward.work

    def write_row(self, grad: Tensor, x: Tensor, digest: int) -> None:
        """Computes the row."""
        made, self.digest = self._made, digest
        variant = x.device, x.dtype, x.data_ptr() % ALIGNMENT, grad.data_ptr() % ALIGNMENT
        partial, count = self._partial(x), float(self.count)
        grid = made.channel_blocks, made.splits, 1
        _launch(
            made, ("backward_sums", *variant), kernels.backward_sums, grid, made.warps,
            grad, x, self._forward, partial, self.work, *made.shape, made.steps, digest, count,
            made.splits == 1, *made.tile,
        )  # fmt: skip
        if made.splits > 1:
            _launch(
                made, ("write_sums", x.device), kernels.write_sums, (made.blocks, 1, 1), 4,
                partial, self._forward, self.work, made.c, made.splits, digest, count, SPLITS_AT_ONCE, BLOCK,
            )  # fmt: skip

    def finish(
        self, weight: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None, *, has_round: bool
    ) -> None:
        """Writes the gradients of weight and bias that are wanted, and with a round what the input's is made of."""
        made = self._made
        types = _type_of(weight), _type_of(of_weight), _type_of(of_bias)
        variant = "finish_backward", self.work.device, *types, self.ranks, self._gathers, has_round
        _launch(
            made, variant, kernels.finish_backward, (made.blocks, 1, 1), 4,
            self._forward, self.work, self.rows, weight, of_weight, of_bias, made.c, self.ranks, self.digest,
            has_round, BLOCK,
        )  # fmt: skip

    def input_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Returns dx, of the type and layout of `x`."""
        made, found = self._made, torch.empty_like(x)
        if made.tiles:
            variant = "input_gradient", x.device, x.dtype, x.data_ptr() % ALIGNMENT, grad.data_ptr() % ALIGNMENT
            grid = made.tiles, made.channel_blocks, 1
            _launch(
                made, variant, kernels.input_gradient, grid, made.warps,
                grad, x, found, self._forward, self.work, *made.shape, *made.tile,
            )  # fmt: skip
        return found


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Compiles all kernels for inputs of a type and runs them, which fails where Triton cannot do that on a device."""
    x = torch.zeros(TILE, 7, dtype=dtype, device=device)  # several splits, so that their sums are added up
    weight, mean, var, gradient = (torch.ones(7, device=device) for _ in range(4))
    running = Running(mean, var, torch.zeros((), dtype=torch.int64, device=device), 0.1)
    with on_device_of(x):
        forward = Forward(x, 1, gathers=False)
        forward.write_row(x, 0)
        forward.finish(weight, weight, running, 1e-5, clamp=False)
        forward.normalise(x)
        backward = Backward(forward, x, gathers=False)
        backward.write_row(x, x, 0)
        backward.finish(weight, gradient, gradient, has_round=True)
        backward.input_gradient(x, x)
