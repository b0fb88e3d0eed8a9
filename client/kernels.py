"""Local reduction and normalisation: everything a replica does with its own slice, on its own device.

The large tensors stay on their device in the compute type (float32, or float64 for float64 input); only vectors of
length C come to the host, where they are float64. A slice is always centred before it is squared or scaled:
`x - center` is nearly exact in float32 even where `mean / std` is 10,000, while `a*x + b` would lose
the digits that matter. What the rounding of the centre leaves over (`mean - center`) is put back in float64.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray


@dataclass(frozen=True, slots=True)
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
    def of(cls, moments: Moments, eps: float, eps_mode: str) -> "Statistics":
        """Returns the statistics of a batch.

        Args:
            moments: of the whole batch, count >= 1.
            eps: keeps `invstd` finite.
            eps_mode: "plus" for (var + eps)^-1/2, "clamp" for max(var, eps)^-1/2.
        """
        variance = moments.variance()
        if eps_mode == "clamp":
            slope = (variance >= eps).astype(np.float64)
            return cls(moments.count, moments.mean, np.maximum(variance, eps) ** -0.5, slope)
        return cls(moments.count, moments.mean, (variance + eps) ** -0.5, np.ones_like(variance))

    def center(self, like: Tensor) -> FloatArray:
        """Returns the mean rounded to the compute type of `like`."""
        rounded = torch.from_numpy(self.mean).to(compute_type(like))
        return rounded.to(torch.float64).numpy()


def compute_type(x: Tensor) -> torch.dtype:
    """Returns float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def moments(x: Tensor) -> Moments:
    """Returns the moments of a slice.

    Args:
        x: shape (N, C, *), any floating-point type, any device. It may be empty.
    """
    channels = x.shape[1]
    if x.numel() == 0:
        return Moments.empty(channels)
    count = x.numel() // channels
    values = x.to(compute_type(x))
    over = _all_but_channel(x)
    center = values.mean(over)
    centred = values - _broadcast(center, x)
    shift, first, second = _to_host(center, centred.sum(over), centred.square().sum(over))
    with np.errstate(all="ignore"):  # inf and NaN pass through, as in torch
        return Moments.from_centred(count, shift + first / count, second - first * first / count)


def normalise(x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (x - mean) * invstd * weight + bias, in the type of `x`.

    Args:
        x: shape (N, C, *).
        statistics: of the round.
        weight: shape (C,) or None for 1.
        bias: shape (C,) or None for 0.
    """
    center = statistics.center(x)
    left_over = (statistics.mean - center) * statistics.invstd
    device_center, scale, left_over_scaled = _to_device(x, center, statistics.invstd, left_over)
    if weight is not None:
        scale, left_over_scaled = scale * weight, left_over_scaled * weight
    shift = -left_over_scaled if bias is None else bias - left_over_scaled
    centred = x.to(compute_type(x)) - _broadcast(device_center, x)
    return centred.mul_(_broadcast(scale, x)).add_(_broadcast(shift, x)).to(x.dtype)


def backward_sums(grad: Tensor, x: Tensor, statistics: Statistics) -> FloatArray:
    """Returns Σdy and Σdy·(x - mean) of a slice: shape (2, C), float64.

    Args:
        grad: the gradient dy of the output, shape (N, C, *).
        x: the input, same shape.
        statistics: of the forward round.
    """
    if x.numel() == 0:
        return np.zeros((2, x.shape[1]))
    center = statistics.center(x)
    (device_center,) = _to_device(x, center)
    over = _all_but_channel(x)
    grad = grad.to(compute_type(x))
    centred = x.to(compute_type(x)) - _broadcast(device_center, x)
    first, second = _to_host(grad.sum(over), centred.mul_(grad).sum(over))
    with np.errstate(all="ignore"):  # inf and NaN pass through, as in torch
        return np.stack((first, second - (statistics.mean - center) * first))


def input_gradient(grad: Tensor, x: Tensor, statistics: Statistics, sums: FloatArray, weight: Tensor | None) -> Tensor:
    """Returns dx, in the type of `x`.

    dx = invstd * weight * (dy - Σdy/n - (x - mean) * invstd² * Σdy·(x - mean)/n), with the sums over all replicas.

    Args:
        grad: dy, shape (N, C, *).
        x: the input, same shape.
        statistics: of the forward round.
        sums: shape (2, C): the aggregate of `backward_sums`.
        weight: shape (C,) or None for 1.
    """
    center = statistics.center(x)
    with np.errstate(all="ignore"):  # inf and NaN pass through, as in torch
        mean_grad, mean_product = sums / statistics.count
        by_centred = -(statistics.invstd**3) * mean_product * statistics.slope
        constant = -statistics.invstd * mean_grad - by_centred * (statistics.mean - center)
    device_center, *factors = _to_device(x, center, statistics.invstd, by_centred, constant)
    if weight is not None:
        factors = [factor * weight for factor in factors]
    by_grad, by_centred_on_device, constant_on_device = (_broadcast(factor, x) for factor in factors)
    centred = x.to(compute_type(x)) - _broadcast(device_center, x)
    centred.mul_(by_centred_on_device).add_(constant_on_device)
    return centred.add_(grad * by_grad).to(x.dtype)


def _all_but_channel(x: Tensor) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _broadcast(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def _to_host(*vectors: Tensor) -> FloatArray:
    """One copy for all vectors, whatever the device; float64 only on the host, since MPS has none."""
    return torch.stack(vectors).cpu().to(torch.float64).numpy()


def _to_device(x: Tensor, *vectors: FloatArray) -> tuple[Tensor, ...]:
    """One copy for all vectors, in the compute type of `x`."""
    return torch.from_numpy(np.stack(vectors)).to(compute_type(x)).to(x.device).unbind()
