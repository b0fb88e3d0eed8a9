"""Local reduction and normalisation: everything a replica does with its own slice, on its own device.

The large tensors stay on their device in the compute type (float32, or float64 for float64 input); only vectors of
length C come to the host, where they are float64. A slice is always centred before it is squared or scaled:
`x - center` is nearly exact in float32 even where `mean / std` is 10,000, while `a*x + b` would lose
the digits that matter. What the rounding of the centre leaves over (`mean - center`) is put back in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from client.kernels import cpu, cuda, numba_backend
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray

# In float32 `a*x + b` is off by up to mean/std * 2^-24 of a standard deviation: with this by 10^-6.
NEAR_ZERO = 16.0

P = ParamSpec("P")
R = TypeVar("R")

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _quietly(function: Callable[P, R]) -> Callable[P, R]:
    """Lets infinity and NaN pass through the vectors, as in torch."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True, eq=False)
class Statistics:
    """What one round says of each channel; every array has shape (C,), float64.

    Attributes:
        count: values per channel over all replicas.
        mean: Σx / n.
        invstd: what the centred input is multiplied with.
        slope: 1 where `invstd` follows the variance, 0 where eps_mode "clamp" holds it.
    """

    count: int
    mean: FloatArray
    invstd: FloatArray
    slope: FloatArray

    @classmethod
    @_quietly
    def of(cls, moments: Moments, eps: float, eps_mode: str) -> "Statistics":
        """Returns the statistics of a batch.

        Args:
            moments: of the whole batch; without values they give zeros, with which there is nothing to normalise.
            eps: keeps `invstd` finite.
            eps_mode: "plus" for (var + eps)^-1/2, "clamp" for max(var, eps)^-1/2.
        """
        if moments.count == 0:
            return cls(1, *np.zeros((3, len(moments.sums))))
        variance = moments.variance()
        if eps_mode == "clamp":
            slope = (variance >= eps).astype(np.float64)
            return cls(moments.count, moments.mean, 1 / np.sqrt(np.maximum(variance, eps)), slope)
        return cls(moments.count, moments.mean, 1 / np.sqrt(variance + eps), np.ones_like(variance))

    @cached_property
    def is_near_zero(self) -> bool:
        """Whether every mean is so few standard deviations from 0 that x need not be centred before it is scaled."""
        with np.errstate(all="ignore"):  # NaN is not near
            return bool((np.abs(self.mean) * self.invstd <= NEAR_ZERO).all())

    def center(self, like: Tensor) -> FloatArray:
        """Returns the mean rounded to the compute type of `like`."""
        rounded = torch.from_numpy(self.mean).to(compute_type(like))
        return rounded.to(torch.float64).numpy()


def compute_type(x: Tensor) -> torch.dtype:
    """Returns float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def count(x: Tensor, mask: Tensor | None) -> int:
    """Returns how many values per channel count for the statistics, exactly; arguments as for `moments`."""
    return x.numel() // x.shape[1] if mask is None else int(mask.sum())


@_quietly
def moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Returns the moments of a slice.

    Args:
        x: shape (N, C, *), any floating-point type, any device. It may be empty.
        mask: shape (N, *), bool: which positions count; None for all.
    """
    number = count(x, mask)
    if number == 0:
        return Moments.empty(x.shape[1])
    if mask is None and numba_backend.takes(x):
        return _moments_compiled(dense(x), number)
    if mask is None and cpu.takes(x):
        return _moments_on_cpu(dense(x), number)
    if mask is None and cuda.takes(x) and (found := cuda.moments(dense(x))):
        return Moments.from_centred(number, *found)
    values = where(mask, x.to(compute_type(x)))
    center = total(values) / number
    deviations = where(mask, values - _broadcast(center, x))
    return _around(number, *to_host(center, total(deviations), total(deviations.square())))


def _moments_on_cpu(x: Tensor, number: int) -> Moments:
    first, second = cpu.sums(x, x)
    if cpu.are_near_zero(first, second, number):
        return Moments(number, first, second)
    center = vector(first / number, x).double().numpy()
    return _around(number, center, *cpu.shifted_sums(x, center))


def _moments_compiled(x: Tensor, number: int) -> Moments:
    first, second = numba_backend.shifted_sums(x, np.zeros(x.shape[1]))
    if cpu.are_near_zero(first, second, number):
        return Moments(number, first, second)
    center = numba_backend.rounded(first / number)
    return _around(number, center, *numba_backend.shifted_sums(x, center))


def _around(number: int, center: FloatArray, first: FloatArray, second: FloatArray) -> Moments:
    """Returns the moments of values whose Σ(x - center) and Σ(x - center)² these are; shape (C,)."""
    return Moments.from_centred(number, center + first / number, second - first * first / number)


@_quietly
def normalise(x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (x - mean) * invstd * weight + bias, in the type of `x`.

    Args:
        x: shape (N, C, *).
        statistics: of the round.
        weight: shape (C,) or None for 1.
        bias: shape (C,) or None for 0.
    """
    if numba_backend.takes(x):
        return numba_backend.normalise(dense(x), statistics.mean, statistics.invstd, weight, bias)
    if cpu.takes(x) and statistics.is_near_zero:
        factor = _weighted(statistics, weight)
        addend = -factor * statistics.mean
        return cpu.scale(dense(x), factor, addend if bias is None else addend + on_host(bias))
    if cuda.takes(x):
        return cuda.normalise(dense(x), statistics.mean, statistics.invstd, weight, bias)
    return affine(x, statistics, statistics.invstd, np.zeros_like(statistics.mean), weight, bias).to(x.dtype)


@_quietly
def backward_sums(grad: Tensor, x: Tensor, statistics: Statistics, mask: Tensor | None = None) -> FloatArray:
    """Returns Σdy and Σdy·(x - mean) of a slice: shape (2, C), float64.

    Masked positions are normalised with the statistics too, so their gradients count here; but where such a gradient
    is 0, as a loss that leaves them out makes it, a NaN or infinity that pads the input does no harm.

    Args:
        grad: the gradient dy of the output, shape (N, C, *).
        x: the input, same shape.
        statistics: of the forward round.
        mask: as for `moments`.
    """
    if x.numel() == 0:
        return np.zeros((2, x.shape[1]))
    if mask is None and numba_backend.takes(x):
        return numba_backend.backward_sums(*alike(grad, x), statistics.mean)
    if mask is None and cpu.takes(x) and statistics.is_near_zero:
        found = cpu.sums(*alike(grad, x))
        found[1] -= statistics.mean * found[0]
        return found
    if mask is None and cuda.takes(x):
        return cuda.backward_sums(*alike(grad, x), statistics.mean, statistics.invstd)
    grad = grad.to(compute_type(x))
    deviations, rest = centred(x, statistics)
    if mask is not None:
        deviations = deviations.masked_fill(~mask.unsqueeze(1) & (grad == 0), 0)
    first, second = to_host(total(grad), total(deviations.mul_(grad)))
    return np.stack((first, second - rest * first))


@_quietly
def input_gradient(
    grad: Tensor,
    x: Tensor,
    statistics: Statistics,
    sums: FloatArray,
    weight: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns dx, in the type of `x`.

    dx = invstd * weight * (dy - m·Σdy/n - m·(x - mean) * invstd² * Σdy·(x - mean)/n), with the sums over all replicas
    and m = 1 where a position counts, else 0.

    Args:
        grad: dy, shape (N, C, *).
        x: the input, same shape.
        statistics: of the forward round.
        sums: shape (2, C): the aggregate of `backward_sums`.
        weight: shape (C,) or None for 1.
        mask: as for `moments`.
    """
    means = sums / statistics.count
    means[1] *= statistics.slope
    invstd = statistics.invstd
    if mask is None and numba_backend.takes(x):
        return numba_backend.input_gradient(*alike(grad, x), statistics.mean, invstd, means, weight)
    mean_grad, slope = means[0], invstd * invstd * means[1]
    if mask is None and cpu.takes(x) and statistics.is_near_zero:
        by_grad = _weighted(statistics, weight)
        factor = -by_grad * slope
        return cpu.combine(*alike(grad, x), by_grad, factor, -by_grad * mean_grad - factor * statistics.mean)
    if mask is None and cuda.takes(x):
        return cuda.input_gradient(*alike(grad, x), statistics.mean, invstd, means, weight)
    through_statistics = where(mask, affine(x, statistics, -invstd * slope, -invstd * mean_grad, weight))
    return through_statistics.add_(scaled(grad, invstd, weight)).to(x.dtype)


def affine(
    x: Tensor,
    statistics: Statistics,
    by_centred: FloatArray,
    constant: FloatArray,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns (by_centred * (x - mean) + constant) * weight + bias in the compute type; vectors of shape (C,).

    It lies in memory as torch's batch norm would put it: channels_last if `x` does, else contiguous.
    """
    center = statistics.center(x)
    with np.errstate(all="ignore"):  # as above
        rest = constant - by_centred * (statistics.mean - center)
    device_center, factor, addend = to_device(x, center, by_centred, rest)
    if weight is not None:
        factor, addend = factor * weight, addend * weight
    if bias is not None:
        addend = addend + bias
    deviations = laid_out(x.to(compute_type(x)) - _broadcast(device_center, x))
    return deviations.mul_(_broadcast(factor, x)).add_(_broadcast(addend, x))


def _weighted(statistics: Statistics, weight: Tensor | None) -> FloatArray:
    return statistics.invstd if weight is None else statistics.invstd * on_host(weight)


def on_host(vector: Tensor) -> FloatArray:
    """Returns a parameter as float64 on the host: a copy, for `numpy()` makes its storage one that cannot be resized.

    Resizing it is how FSDP frees a parameter.
    """
    return vector.detach().to("cpu", torch.float64, copy=True).numpy()


def alike(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both dense, in the type and layout of `x`."""
    x = dense(x)
    grad = grad.to(x.dtype)
    return (grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)), x


def scaled(x: Tensor, factor: FloatArray, weight: Tensor | None = None) -> Tensor:
    """Returns x * factor * weight; vectors of shape (C,)."""
    by = vector(factor, x)
    return x * _broadcast(by if weight is None else by * weight, x)


def vector(values: FloatArray, x: Tensor) -> Tensor:
    """Returns `values`, shape (C,), on the device of `x` and in its compute type, in memory of their own."""
    return to_device(x, values)[0]


def centred(x: Tensor, statistics: Statistics) -> tuple[Tensor, FloatArray]:
    """Returns x - center in the compute type, and mean - center in float64, shape (C,)."""
    center = statistics.center(x)
    return x.to(compute_type(x)) - _broadcast(vector(center, x), x), statistics.mean - center


def where(mask: Tensor | None, x: Tensor) -> Tensor:
    """Returns `x` with 0 where the mask says that a position does not count."""
    return x if mask is None else x.clone().masked_fill_(~mask.unsqueeze(1), 0)  # masked_fill would forget the layout


def total(x: Tensor) -> Tensor:
    """Returns the sum per channel, shape (C,).

    First over positions, then over samples: in one go torch adds the samples one by one, which in float32 and at
    millions of them loses percents.
    """
    positions = list(range(2, x.dim()))
    return (x.sum(positions) if positions else x).sum(0)


def laid_out(x: Tensor) -> Tensor:
    """Returns `x` if it is channels_last, else contiguous, so that who takes a `view` of torch's output may here."""
    layout = _CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    return x if x.is_contiguous(memory_format=layout) else x.contiguous()


def dense(x: Tensor) -> Tensor:
    """Returns `x` as the output for it is laid out; a copy only if it is not."""
    if x.is_contiguous() or x.is_contiguous(memory_format=_CHANNELS_LAST.get(x.dim(), torch.contiguous_format)):
        return x
    return laid_out(torch.empty_like(x)).copy_(x)  # so that what has gaps, but lies as channels_last, stays so


def to_host(*vectors: Tensor) -> FloatArray:
    """One copy for all vectors, whatever the device; float64 only on the host, since MPS has none."""
    return torch.stack(vectors).cpu().to(torch.float64).numpy()


def _broadcast(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def to_device(x: Tensor, *vectors: FloatArray) -> tuple[Tensor, ...]:
    """One copy for all vectors to the device of `x`, in its compute type; to CUDA nobody waits for it."""
    if x.is_cpu:
        dtype = np.float64 if x.dtype == torch.float64 else np.float32
        return tuple(torch.from_numpy(vector.astype(dtype)) for vector in vectors)
    if x.is_cuda:
        return cuda.to_device(x, *vectors)
    return torch.from_numpy(np.stack(vectors)).to(compute_type(x)).to(x.device).unbind()
