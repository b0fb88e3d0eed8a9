"""Compiled kernels on a CPU: each step in one pass over memory, by numba, which is an extra.

Torch's operators, put together in `client.kernels.cpu`, take several passes wherever bfloat16 meets float32. Here each
value is widened, computed with in float32 and rounded once, to the nearest even. Values are centred on the way, so that
it does not matter how far from zero they are.

A dense tensor is seen as flat memory: planes of equal length, one channel each, or rows whose channels lie last.
Torch's own threads share it, without Python's lock; torch lends them from 2.10 on, and before, the caller's works
alone.
"""

import importlib
import logging
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from client.border import at_border
from client.kernels.cpu import output_for
from client.kernels.torch_threads import share
from statsd_bn.errors import ConfigurationError
from statsd_bn.reduction import FloatArray

logger = logging.getLogger(__name__)

# Rows are laid beside each other up to this many columns: enough for wide instructions, and their sums stay in the
# first cache. Several rows at a time were slower where the tensor comes from memory.
COLUMNS = 512

# Values in a part of rows, which are added in float32 before their sum goes to float64: 128 rows or so, of many
# channels at least 64, that the sums stay small beside the tensor.
PART, PART_ROWS = 2**16, 64

# Values that are worth another thread, as torch's operators have it.
GRAIN = 2**15

Vectors = NDArray[np.float32]

_WITH_MEMORY = (Tensor, nn.Parameter)

# `client.kernels.numba_kernels`, once somebody has asked for it.
_kernels: Any = None


@at_border
def use_compiled_kernels() -> None:
    """From now on numba's kernels do the local work on bfloat16, and on float32 whose channels do not lie last.

    The first time on a machine they are compiled, which takes seconds, and kept beside their module, or where
    NUMBA_CACHE_DIR says, or in the user's cache. The environment variable STATSD_BN_COMPILED=1 does the same as the
    call. Results differ from the other way's in the last digits; members may do the one or the other.

    Raises:
        ConfigurationError: numba is not installed, or has no folder that it may write to.
    """
    global _kernels  # noqa: PLW0603 - the process's one switch
    logger.info("loading the compiled kernels; where numba's cache has none they are compiled, which takes seconds")
    started = time.monotonic()
    try:
        _kernels = importlib.import_module("client.kernels.numba_kernels")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"compiled kernels: expected statsd-bn[compiled] to be installed; {error}") from error
    except RuntimeError as error:
        raise ConfigurationError(
            f"compiled kernels: expected a folder that numba may write to, set NUMBA_CACHE_DIR to one; {error}"
        ) from error
    logger.info("the compiled kernels are loaded, after %.1f s", time.monotonic() - started)


def takes(x: Tensor) -> bool:
    """Whether `x`, dense or not, may come here: if somebody asked for it, bfloat16 and float32 in planes.

    Rows of float32 are left to torch's operators, which are as fast there, and so are the other types, and subclasses
    of tensors, which may have no memory of their own.
    """
    if _kernels is None or type(x) not in _WITH_MEMORY or not x.is_cpu or x.numel() == 0 or x.is_neg():
        return False
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.is_contiguous() and not _columns(x))


def shifted_sums(x: Tensor, center: FloatArray) -> FloatArray:
    """Returns Σ(x - c) and Σ(x - c)², shape (2, C); `center`, c, has shape (C,) and whatever float32 holds."""
    return _sums(x, x, center, center)


def rounded(values: FloatArray) -> FloatArray:
    """Returns what float32 holds of them."""
    return values.astype(np.float32).astype(np.float64)


def normalise(x: Tensor, mean: FloatArray, invstd: FloatArray, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (x - mean) * invstd * weight + bias, rounded to the type of a dense `x` once.

    Args:
        x: shape (N, C, *).
        mean: shape (C,), float64.
        invstd: shape (C,), float64.
        weight: shape (C,) or None for 1.
        bias: shape (C,) or None for 0.

    Raises:
        ValueError: weight or bias has another shape.
    """
    columns = _columns(x)
    weight, bias = _in_float32(weight, x), _in_float32(bias, x)
    vectors = _kernels.for_output(mean, invstd, _address(weight), _address(bias), columns or x.shape[1])
    output = output_for(x)
    _run(_kernels.scale_rows if columns else _kernels.scale_planes, x, vectors, columns or _plane(x), output=output)
    return output


def backward_sums(grad: Tensor, x: Tensor, mean: FloatArray) -> FloatArray:
    """Returns Σdy and Σdy·(x - mean), shape (2, C); `grad`, dy, is of the type and layout of `x`, which is dense."""
    center = rounded(mean)
    found = _sums(grad, x, center, np.zeros_like(center))
    found[1] += (center - mean) * found[0]
    return found


def input_gradient(
    grad: Tensor, x: Tensor, mean: FloatArray, invstd: FloatArray, means: FloatArray, weight: Tensor | None
) -> Tensor:
    """Returns dx, rounded to the type of a dense `x` once: see `dispatch.input_gradient`.

    Args:
        grad: dy, of the type and layout of `x`.
        x: shape (N, C, *).
        mean: shape (C,), float64.
        invstd: shape (C,), float64.
        means: shape (2, C), float64: Σdy / n and slope * Σdy·(x - mean) / n.
        weight: shape (C,) or None for 1.

    Raises:
        ValueError: weight has another shape.
    """
    columns = _columns(x)
    weight = _in_float32(weight, x)
    vectors = _kernels.for_gradient(mean, invstd, means, _address(weight), columns or x.shape[1])
    output = output_for(x)
    kernel = _kernels.combine_rows if columns else _kernels.combine_planes
    _run(kernel, x, vectors, columns or _plane(x), grad=grad, output=output)
    return output


def _sums(grad: Tensor, x: Tensor, center: FloatArray, shift: FloatArray) -> FloatArray:
    columns = _columns(x)
    vectors = _kernels.for_sums(center, shift, columns or x.shape[1])
    length = max(PART // columns, PART_ROWS) * columns if columns else _plane(x)
    sums = np.empty((2, -(-x.numel() // length), columns or 1), np.float32)
    _run(_kernels.sum_rows if columns else _kernels.sum_planes, x, vectors, length, grad=grad, sums=sums)
    found: FloatArray = _kernels.by_channel(sums, x.shape[1])
    return found


def _run(
    kernel: Any,
    x: Tensor,
    vectors: Vectors,
    length: int,
    *,
    grad: Tensor | None = None,
    output: Tensor | None = None,
    sums: Vectors | None = None,
) -> None:
    """Shares units of so many values among torch's threads."""
    number = x.numel()
    grad = None if grad is None else grad.resolve_neg()
    given = _kernels.Given(
        grad=_address(grad),
        x=_address(x),
        output=_address(output),
        vectors=vectors.ctypes.data,
        sums=0 if sums is None else sums.ctypes.data,
        number=number,
        length=length,
        width=vectors.shape[1],
        is_half=x.dtype == torch.bfloat16,
    )
    share(-(-number // length), -(-GRAIN // length), kernel.address, given)


def _columns(x: Tensor) -> int:
    """Returns how many columns `x` is dealt to if its channels lie last, else 0."""
    if x.dim() > 2 and x.stride(1) != 1:  # noqa: PLR2004
        return 0
    channels = x.shape[1]
    return max(COLUMNS // channels, 1) * channels


def _plane(x: Tensor) -> int:
    """Returns how many values a plane has."""
    return x.numel() // (x.shape[0] * x.shape[1])


def _in_float32(vector: Tensor | None, x: Tensor) -> Tensor | None:
    """Returns a vector of the channels of `x` as the kernels read it."""
    if vector is None:
        return None
    if vector.shape != x.shape[1:2]:
        raise ValueError(f"expected weight and bias of shape ({x.shape[1]},), got {tuple(vector.shape)}")
    if vector.dtype == torch.float32 and vector.is_cpu and vector.is_contiguous() and not vector.is_neg():
        return vector
    return vector.detach().to("cpu", torch.float32).resolve_neg().contiguous()


def _address(tensor: Tensor | None) -> int:
    """Returns where its values lie, 0 for None."""
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if address == 0:
        raise RuntimeError(f"expected a tensor with memory of its own, got {type(tensor).__name__}, which has none")
    return address
