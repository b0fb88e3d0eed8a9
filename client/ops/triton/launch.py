"""Launches of the kernels: the tiling of an input, the buffers of a pass, and the arguments of each kernel.

Triton's `kernel[grid](...)` takes 80 µs of host time to find the compiled variant, where a launch takes 10. So a
variant is looked up once, and cached under a key with all that Triton compiles variants for: types, None, numbers that
are 1 or divisible by 16, and addresses divisible by 16. Numbers follow from the input's shape, so each shape has its
own variants.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from client.ops.statistics import Running

# Values per tile; programs that fill a large GPU; the maximum number of tiles that one program adds in float32, as long
# as the maximum number of programs of a launch allows.
TILE, PROGRAMS, MAX_STEPS, MAX_PROGRAMS = 4096, 1056, 64, 65535

# Channels per program of kernels over vectors, and partial sums that they add at a time.
BLOCK, SPLITS_AT_ONCE = 128, 16

# Addresses and numbers divisible by this have separate variants.
ALIGNMENT = 16

_WORD = torch.float64


class Tiling:
    """Tiling of the dense inputs of a shape and layout, which the kernels read as (n, c, s)."""

    def __init__(self, shape: tuple[int, ...], is_contiguous: bool) -> None:
        n, c, *positions = shape
        s = prod(positions)
        if 0 in shape:
            n, s = 0, 1
        elif not is_contiguous:
            n, s = n * s, 1
        block_s = min(_power_of_2(s), 256)
        block_c = min(_power_of_2(c), max(128 // block_s, 1))
        block_n = min(_power_of_2(n), max(TILE // (block_s * block_c), 1))
        self.shape, self.tile = (n, c, s), (block_n, block_c, block_s)
        self.warps = min(max(prod(self.tile) // 512, 1), 8)
        self.tiles = -(-n // block_n) * -(-s // block_s)
        self.channel_blocks = -(-c // block_c)
        wanted = max(-(-PROGRAMS // self.channel_blocks), -(-self.tiles // MAX_STEPS), 1)
        self.steps = max(-(-self.tiles // min(wanted, MAX_PROGRAMS)), 1)  # tiles that a program of a sum adds
        self.splits = max(-(-self.tiles // self.steps), 1)
        self.blocks = -(-c // BLOCK)  # of channels, for kernels over vectors
        self.compiled: dict[Any, Any] = {}  # the kernel variants for these inputs


_tiling = lru_cache(maxsize=4096)(Tiling)


def tiling_of(x: Tensor) -> Tiling:
    """Tiling of a dense input."""
    return _tiling(x.shape, x.is_contiguous())


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def fits(x: Tensor) -> bool:
    """Whether the indices fit: tiles are numbered in 32 bits, blocks of channels in 16, values in 64."""
    channels = x.shape[1]
    return 0 < channels <= MAX_PROGRAMS and x.numel() // channels < 2**31 - 2 * TILE


def _launch(tiling: Tiling, variant: tuple[Any, ...], grid: tuple[int, int, int], warps: int, *arguments: Any) -> None:
    """Launch a variant of the kernel that is named first in it."""
    compiled = tiling.compiled.get(variant)
    if compiled is None:
        from client.ops.triton import kernels  # noqa: PLC0415 - needs Triton

        compiled = getattr(kernels, variant[0])[grid](*arguments, num_warps=warps, **kernels.OPTIONS)
        if compiled is not None:  # the interpreter compiles nothing
            tiling.compiled[variant] = compiled
        return
    compiled[grid](*arguments)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the input's device the current one, where kernels are launched."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class Pass:
    """One pass, with its buffers: `forward` is the buffer of its forward pass, None for a forward pass.

    `ranks` rows take part in its round; `gathers`: whether other ranks send some of them. Inputs are dense. Their
    layout may differ between the passes, but a gradient has that of its input.
    """

    __slots__ = ("_forward", "blocks", "count", "digest", "flags", "gathers", "ranks", "row", "rows", "tiling", "work")

    def __init__(self, x: Tensor, ranks: int, forward: Tensor | None = None, *, gathers: bool) -> None:
        self.tiling = tiling = tiling_of(x)
        n, c, s = tiling.shape
        head, size = 1 + 6 * c if forward is None else 3 * c, 2 * c + 2
        self.blocks = tiling.blocks  # each block of channels writes its own flags
        flags = (ranks + (forward is None)) * tiling.blocks
        self.gathers, self.ranks, self.digest = gathers, ranks, 0
        self.count = n * s  # this rank's values per channel
        own = head + size
        self.work = torch.empty(own if gathers else own + flags, dtype=_WORD, device=x.device)
        self._forward = self.work if forward is None else forward
        self.row, behind = self.work[head:own], self.work[head:]  # the row: shape (2 * C + 2,)
        shared = torch.empty(ranks * size + flags, dtype=_WORD, device=x.device) if gathers else behind
        self.rows, self.flags = shared.split_with_sizes([ranks * size, flags])

    @property
    def statistics(self) -> Tensor:
        """Mean, invstd and slope of a forward pass, shape (3, C)."""
        return self.work[1 : 1 + 3 * self.tiling.shape[1]].view(3, -1)

    def release_rows(self) -> None:
        """Release rows and flags, which grow with the number of ranks; the rest is saved for the backward pass."""
        del self.rows, self.flags

    def write_row(self, dy: Tensor | None, x: Tensor, digest: int) -> tuple[Tensor, Tensor]:
        """Compute the row, by a second kernel where the first one's programs add several splits.

        Returns the row, and the output for the rows of all ranks.
        """
        tiling, self.digest = self.tiling, digest
        count, is_whole, forward = float(self.count), tiling.splits == 1, None if dy is None else self._forward
        # With one split the buffer for the sums of splits is unused.
        size = (1 + 2 * tiling.splits) * x.shape[1]
        partial = self.work if is_whole else torch.empty(size, dtype=_WORD, device=x.device)
        _launch(
            tiling, ("sums", *_kind(dy, x)), (tiling.channel_blocks, tiling.splits, 1), tiling.warps,
            dy, x, forward, partial, self.row, *tiling.shape, tiling.steps, digest, count, is_whole, *tiling.tile,
        )  # fmt: skip
        if not is_whole:
            _launch(
                tiling, ("write_row", x.device, dy is None), (tiling.blocks, 1, 1), 4,
                partial, forward, self.row, x.shape[1], tiling.splits, digest, count, SPLITS_AT_ONCE, BLOCK,
            )  # fmt: skip
        return self.row, self.rows

    def finish(self, weight: Tensor | None, bias: Tensor | None, running: Running, eps: float, *, clamp: bool) -> None:
        """Compute the statistics from all rows of a forward pass, and update the running statistics."""
        *buffers, momentum = running
        vectors = _contiguous(weight), _contiguous(bias), *buffers
        self._finish("finish", (self.work,), vectors, eps, momentum, option=clamp)

    def finish_backward(
        self, weight: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None, *, has_round: bool
    ) -> None:
        """Write the gradients of weight and bias that are not None and, after a round, the factors of the input's."""
        vectors = _contiguous(weight), of_weight, of_bias
        self._finish("finish_backward", (self._forward, self.work), vectors, option=has_round)

    def _finish(
        self, name: str, work: tuple[Tensor, ...], vectors: Sequence[Tensor | None], *numbers: float, option: bool
    ) -> None:
        """Compute what follows from all rows, by one program for each block of channels."""
        tiling, types = self.tiling, (None if each is None else each.dtype for each in vectors)
        variant = name, self.work.device, *types, self.ranks, self.gathers, option
        _launch(
            tiling, variant, (tiling.blocks, 1, 1), 4,
            *work, self.rows, *vectors, tiling.shape[1], self.ranks, self.digest, *numbers, option, BLOCK,
        )  # fmt: skip

    def affine(self, dy: Tensor | None, x: Tensor) -> Tensor:
        """Output of a forward pass, or gradient of the input, of the type and layout of `x`."""
        tiling, output = tiling_of(x), torch.empty_like(x)  # a recomputed forward pass may have another layout
        if tiling.tiles:
            grid = tiling.tiles, tiling.channel_blocks, 1
            arguments = dy, x, output, self._forward, self.work, *tiling.shape, *tiling.tile
            _launch(tiling, ("affine", *_kind(dy, x)), grid, tiling.warps, *arguments)
        return output


def _kind(dy: Tensor | None, x: Tensor) -> tuple[Any, ...]:
    """Part of a variant's key for a kernel that reads a slice."""
    return x.device, x.dtype, x.data_ptr() % ALIGNMENT, None if dy is None else dy.data_ptr() % ALIGNMENT


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Compile and run all kernels for inputs of a type; raise where Triton cannot do that on a device."""
    x = torch.zeros(TILE, 7, dtype=dtype, device=device)  # several splits
    weight, mean, var, gradient = (torch.ones(7, device=device) for _ in range(4))
    running = Running(mean, var, torch.zeros((), dtype=torch.int64, device=device), 0.1)
    with on_device_of(x):
        forward = Pass(x, 1, gathers=False)
        forward.write_row(None, x, 0)
        forward.finish(weight, weight, running, 1e-5, clamp=False)
        forward.affine(None, x)
        backward = Pass(x, 1, forward.work, gathers=False)
        backward.write_row(x, x, 0)
        backward.finish_backward(weight, gradient, gradient, has_round=True)
        backward.affine(x, x)
