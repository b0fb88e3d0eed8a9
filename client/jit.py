"""The kernels' compiled way on a CPU: each step in one pass over memory, by numba, which is an extra.

Torch's operators, put together in `client.cpu`, take several passes wherever bfloat16 meets float32. Here each
value is widened, computed with in float32 and rounded once, to the nearest even. Values are centred on the way, so that
it does not matter how far from zero they are.

A dense tensor is seen as flat memory: planes of equal length, one channel each, or rows whose channels lie last. One
thread does it all, the caller's, without Python's lock: where others want the cores too, to wait for a second one took
longer than to do its work.
"""

import importlib
import logging
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.cpu import fresh
from statsd_bn.errors import ConfigurationError
from statsd_bn.reduction import FloatArray

logger = logging.getLogger(__name__)

# Rows are laid beside each other up to this many columns: enough for wide instructions, and their sums stay in the
# first cache. Several rows at a time were slower where the tensor comes from memory.
COLUMNS = 512

# Values in a part of rows, which are added in float32 before their sum goes to float64: 512 rows or so.
PART = 2**18

# `client.jit_kernels`, once somebody has asked for it.
_kernels: Any = None


def use_compiled_kernels() -> None:
    """From now on numba's kernels do the local work on bfloat16, and on float32 whose channels do not lie last.

    The first time on a machine they are compiled, which takes seconds, and kept beside their module, or where
    NUMBA_CACHE_DIR says. The environment variable STATSD_BN_COMPILED=1 does the same as the call. Results differ from
    the other way's in the last digits; members may do the one or the other.

    Raises:
        ConfigurationError: numba is not installed.
    """
    global _kernels  # noqa: PLW0603 - the process's one switch
    logger.info("loading the compiled kernels; where numba's cache has none they are compiled, which takes seconds")
    started = time.monotonic()
    try:
        _kernels = importlib.import_module("client.jit_kernels")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"compiled kernels: expected statsd-bn[compiled] to be installed; {error}") from error
    logger.info("the compiled kernels are loaded, after %.1f s", time.monotonic() - started)


def takes(x: Tensor) -> bool:
    """Whether `x`, dense or not, may come here: if somebody asked for it, bfloat16 and float32 in planes.

    Rows of float32 are left to torch's operators, which are as fast there, and so are the other types.
    """
    if _kernels is None or not x.is_cpu or x.numel() == 0:
        return False
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.is_contiguous() and not _columns(x))


def sums(grad: Tensor, x: Tensor, mean: FloatArray) -> FloatArray:
    """Returns Σg and Σg·(x - mean), shape (2, C); `grad`, g, is of the type and layout of `x`, which is dense."""
    center = rounded(mean)
    found = _sums(grad, x, center, np.zeros_like(center))
    found[1] += (center - mean) * found[0]
    return found


def shifted_sums(x: Tensor, center: FloatArray) -> FloatArray:
    """Returns Σ(x - c) and Σ(x - c)², shape (2, C); `center`, c, has shape (C,) and whatever float32 holds."""
    return _sums(x, x, center, center)


def rounded(values: FloatArray) -> FloatArray:
    """Returns what float32 holds of them."""
    return values.astype(np.float32).astype(np.float64)


def _sums(grad: Tensor, x: Tensor, center: FloatArray, shift: FloatArray) -> FloatArray:
    channels = x.shape[1]
    columns = _columns(x)
    vectors = _kernels.in_float32(center, shift, center, center, columns // channels or 1)
    if columns:
        length = max(PART // columns, 1) * columns
        found = np.empty((2, -(-x.numel() // length), columns))
        _kernels.sum_rows(_flat(grad), _flat(x), vectors, found, length)
    else:
        found = np.empty((2, x.shape[0] * channels, 1))
        _kernels.sum_planes(_flat(grad), _flat(x), vectors, found, x.numel() // found.shape[1])
    by_channel: FloatArray = found.reshape(2, -1, channels).sum(1)
    return by_channel


def scale(x: Tensor, mean: FloatArray, factor: FloatArray, addend: FloatArray) -> Tensor:
    """Returns (x - mean) * factor + addend, rounded to the type of `x` once; `x` is dense, vectors of shape (C,)."""
    kernel = _kernels.scale_rows if _columns(x) else _kernels.scale_planes
    return _into_fresh(kernel, (x,), mean, factor, addend, factor)


def combine(
    grad: Tensor, x: Tensor, mean: FloatArray, by_grad: FloatArray, factor: FloatArray, addend: FloatArray
) -> Tensor:
    """Returns g * by_grad + (x - mean) * factor + addend, rounded to the type of `x` once.

    Args:
        grad: g, of the type and layout of `x`.
        x: shape (N, C, *), dense.
        mean: shape (C,), as the other vectors.
        by_grad: shape (C,).
        factor: shape (C,).
        addend: shape (C,).
    """
    kernel = _kernels.combine_rows if _columns(x) else _kernels.combine_planes
    return _into_fresh(kernel, (grad, x), mean, factor, addend, by_grad)


def _into_fresh(kernel: Any, tensors: tuple[Tensor, ...], *vectors: FloatArray) -> Tensor:
    x = tensors[-1]
    output = fresh(x)
    columns = _columns(x)
    length = columns or x.numel() // (x.shape[0] * x.shape[1])
    repeated = _kernels.in_float32(*vectors, columns // x.shape[1] or 1)
    kernel(*map(_flat, (*tensors, output)), repeated, length)
    return output


def _columns(x: Tensor) -> int:
    """Returns how many columns `x` is dealt to if its channels lie last, else 0."""
    channels = x.shape[1]
    return max(COLUMNS // channels, 1) * channels if x.dim() == 2 or x.stride(1) == 1 else 0  # noqa: PLR2004


def _flat(x: Tensor) -> NDArray[Any]:
    """Returns the memory of a dense `x`; of bfloat16 the bits."""
    flat = x.detach().as_strided((x.numel(),), (1,))
    return (flat.view(torch.uint16) if x.dtype == torch.bfloat16 else flat).numpy()
