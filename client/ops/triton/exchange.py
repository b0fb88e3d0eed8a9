"""TritonExchange: the plain call on CUDA, computed by Triton's kernels, and the check that they work on a device."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib import import_module
from math import isnan, prod
from typing import Any

import torch
from torch import Tensor

from client.ops import non_finite
from client.ops.device_errors import DeviceErrors, Flags, TooFewValues, async_checks
from client.ops.exchange import PlainExchange
from client.ops.functional import Slice, is_plain
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running, dense, same_layout
from client.transports import device_rows
from client.transports.device_rows import DeviceAggregate, LocalRows
from client.transports.process_group import ProcessGroupPipe
from statsd_bn.round_key import BACKWARD, RoundKey

logger = logging.getLogger("statsd_bn.client")

# Older versions of Triton pass numbers to kernels as float32, whatever the annotation of the argument.
OLDEST = (3, 4)

TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

# A tile has at most TILE values. PROGRAMS programs fill a large GPU. A grid's second axis has at most MAX_PROGRAMS.
# One program adds at most MAX_STEPS tiles in float32, or more where the splits would otherwise exceed MAX_PROGRAMS.
TILE, PROGRAMS, MAX_PROGRAMS, MAX_STEPS = 4096, 1056, 65535, 64

# In kernels over vectors a program has BLOCK channels; `write_row` adds the sums of SPLITS_AT_ONCE splits at a time.
BLOCK, SPLITS_AT_ONCE = 128, 16

# Triton compiles separate variants of a kernel for addresses and numbers divisible by this.
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
        self.splits = max(-(-self.tiles // self.steps), 1)  # parts of the tiles, each summed by one program
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
    """Launch a kernel; `variant`, the kernel's name and all that affects its compilation, is the key of the cache."""
    # `kernel[grid](...)` takes 80 µs of host time to find the compiled variant; the launch itself takes 10 µs. So the
    # variant is looked up once, and cached. Variants differ by the arguments' types, by numbers that are 1 or divisible
    # by 16, and by addresses divisible by 16. Sizes follow from the input's shape: each shape has its own cache.
    compiled = tiling.compiled.get(variant)
    if compiled is None:
        from client.ops.triton import kernels  # noqa: PLC0415 - needs Triton

        compiled = getattr(kernels, variant[0])[grid](*arguments, num_warps=warps, **kernels.OPTIONS)
        if compiled is not None:  # the interpreter compiles nothing
            tiling.compiled[variant] = compiled
        return
    compiled[grid](*arguments)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the input's device the current device: Triton launches kernels there."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class Pass:
    """One pass, with its buffers. A backward pass also reads `forward`, the buffer of its forward pass.

    Its round has `ranks` rows; `gathers`: whether other ranks send some of them. Inputs are dense. A backward pass may
    get the input in another layout than the forward pass did, and gets the output's gradient in the input's layout.
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
        """Mean, invstd and slope of a forward pass as in `ChannelStatistics`, shape (3, C)."""
        return self.work[1 : 1 + 3 * self.tiling.shape[1]].view(3, -1)

    def release_rows(self) -> None:
        """Release rows and flags, which grow with the number of ranks; the rest is saved for the backward pass."""
        del self.rows, self.flags

    def write_row(self, dy: Tensor | None, x: Tensor, digest: int) -> tuple[Tensor, Tensor]:
        """Compute the row; if several programs add the splits of a channel, a second kernel adds their sums.

        Returns the row, and the buffer for the rows of all ranks.
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
        """Write the gradients of weight and bias that are not None; after a round also the input gradient's factors."""
        vectors = _contiguous(weight), of_weight, of_bias
        self._finish("finish_backward", (self._forward, self.work), vectors, option=has_round)

    def _finish(
        self, name: str, work: tuple[Tensor, ...], vectors: Sequence[Tensor | None], *numbers: float, option: bool
    ) -> None:
        """Launch one of the `finish` kernels, with one program for each block of channels."""
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
    """Compile and run all kernels for inputs of a type on a device; raise the error if that fails."""
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


def serves(slices: Sequence[Slice], capacity: int) -> bool:
    """Whether the kernels can compute a call with these slices, where each rank sends `capacity` rows."""
    mine = slices[0]
    return capacity == len(slices) == 1 and is_plain(mine) and supports(mine.input, mine.weight, mine.bias)


def supports(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernels can compute with an input and its parameters, on the input's device."""
    is_plain_memory = type(x) in {Tensor, torch.nn.Parameter} and not x.is_neg()
    if not is_plain_memory or x.dtype not in TYPES or not x.is_cuda or not works_on(x.device, x.dtype):
        return False
    return fits(x) and all(each is None or each.device == x.device for each in (weight, bias))


@cache
def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton compiles for inputs of a type on a device; logs the reason once if not.

    All kernels are tried: if one failed in a round, the other ranks would wait in that round.
    """
    try:
        version = import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise ImportError(f"expected Triton {'.'.join(map(str, OLDEST))} or newer, got {version}")  # noqa: TRY301
        try_out(device, dtype)
    except Exception as error:  # noqa: BLE001 - compilers, drivers and the import fail in many ways
        text = "Triton failed for %s on %s (%s: %.300s); layers use torch's operators, which cost more host time"
        logger.warning(text, dtype, device, type(error).__name__, error)
        return False
    return True


@dataclass(slots=True, eq=False)
class TritonExchange(PlainExchange):
    """A plain call on CUDA, by Triton's kernels."""

    shape: tuple[int, ...] = field(init=False)  # of the input
    first: Pass = field(init=False)  # the forward pass

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Launch the kernels; the host waits for them only if `on_nonfinite` is "raise"."""
        x = dense(x)
        with on_device_of(x):
            if self.key is None:
                self.shape = tuple(x.shape)
                gathers = isinstance(self.transport, ProcessGroupPipe)
                self.first = first = Pass(x, device_rows.nr_ranks(self.transport), gathers=gathers)
                async_checks.poll(x.device)
                key = device_rows.run_row(self.transport, partial(first.write_row, None, x), phase=self.phase)
                wait = non_finite.raises(self.transport, key)
                # The layer, not the kernel, updates the statistics if the round may raise or the average is cumulative.
                running = None if wait or (self.running and isnan(self.running.momentum)) else self.running
                first.finish(weight, bias, running or Running(), self.eps, clamp=self.eps_mode == "clamp")
                self.has_updated_running = running is not None
                self._submit(first, key, TooFewValues(first.flags, self.layer, self.shape), wait=wait)
                if not self.has_updated_running:
                    self.moments = ChannelMoments(first.work[0], _total(first.rows, first.ranks)[1])
                first.release_rows()
                self.key = key
            return self.first.affine(None, x)

    def lazy_attribute(self, name: str) -> Any:
        """Local moments or statistics, from the forward buffer."""
        if name == "local":
            return [ChannelMoments(self.first.count, self.first.row[2:].view(2, -1), self.shape)]
        if name == "statistics":
            return ChannelStatistics(self.first.work[0].clamp(min=1), self.first.statistics)
        return None

    def _submit(self, of: Pass, key: RoundKey, too_few: TooFewValues | None = None, *, wait: bool = False) -> None:
        # If `report` held `self`, the call would outlive its graph; a checkpoint's second run could use its results.
        transport, row, rows, blocks = self.transport, of.row, of.rows, of.blocks

        def report(flags: Flags) -> None:
            ranks = device_rows.ranks_of(transport)
            aggregate = DeviceAggregate(key, *_total(rows, len(ranks)), rows.view(len(ranks), -1)[:, 1:], ranks)
            contribution = LocalRows(row[1:2].unbind(), row[2:].view(1, 2, -1))
            DeviceErrors(transport, contribution, aggregate, too_few).report_rows(flags, blocks)

        async_checks.submit(of.flags, report, wait=wait)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...] | None:
        """Launch the kernels of the backward pass."""
        is_alike = self.shape == tuple(x.shape) == tuple(grad.shape)
        if not is_alike or not supports(x, weight, None) or (weight is not None and weight.shape != x.shape[1:2]):
            return None
        x = dense(x)
        if grad.dtype != x.dtype or grad.stride() != x.stride():
            grad, x = same_layout(grad, x)
        needs_input, needs_weight, needs_bias = needs
        with on_device_of(x):
            async_checks.poll(x.device)
            backward = Pass(x, self.first.ranks, self.first.work, gathers=self.first.gathers)
            write, key = partial(backward.write_row, grad, x), None
            if needs_input:
                key = device_rows.run_row(self.transport, write, self.next_key(BACKWARD))
            else:  # the parameters' gradients are local sums, as under DDP
                write(0)
            of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
            of_bias = torch.empty(x.shape[1], dtype=torch.float32, device=x.device) if needs_bias else None
            backward.finish_backward(weight, of_weight, of_bias, has_round=needs_input)
            if key is None:
                return None, of_weight, of_bias
            self._submit(backward, key)
            return backward.affine(grad, x), of_weight, of_bias


def _total(rows: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    return device_rows.sum_rows(rows.view(ranks, -1)[:, 1:], (2, -1))
