"""The steps of a layer's call for one slice, and the choice of the backend that computes them.

Vectors may come from another device of the process; they are copied asynchronously.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client.ops import native
from client.ops.reference import Fused, Reference, affine, minus, rounded, scaled, total, where
from client.ops.statistics import (
    ChannelMoments,
    ChannelStatistics,
    compute_type,
    same_layout,
    to_compute_type,
    to_float64,
    vector_device,
)

# The first backend that supports a slice without a mask computes it; otherwise the reference does. The methods of all
# backends are the steps below, and return the same results up to rounding.
BACKENDS: tuple[native.Native | Fused, ...] = (Fused(),) if native.core is None else (native.Native(), Fused())


def backend_for(x: Tensor, mask: Tensor | None = None) -> native.Native | Fused | Reference:
    """Backend for a slice; arguments as for `moments`."""
    if mask is None and x.numel():
        for backend in BACKENDS:
            if backend.supports(x):
                return backend
    return Reference(mask)


def moments(x: Tensor, mask: Tensor | None = None) -> ChannelMoments:
    """Moments of a slice, shape (N, C, *), which may be empty; `mask`, shape (N, *), bool: which positions count."""
    if x.numel():
        return backend_for(x, mask).moments(x)
    return ChannelMoments(0, zeros(2, x), tuple(x.shape))


def normalise(x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x - mean) * invstd * weight + bias, in the type of `x`; None means weight 1 or bias 0."""
    check_parameter("weight", weight, x)
    check_parameter("bias", bias, x)
    return backend_for(x).normalise(x, statistics.beside(x), weight, bias)


def check_parameter(name: str, values: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless a weight or bias has the shape (C,)."""
    if values is not None and values.shape != x.shape[1:2]:
        raise ValueError(f"expected a {name} of shape ({x.shape[1]},), got {tuple(values.shape)}")


def prepare_backward(grad: Tensor, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradient and input in one layout, so that later steps need no copy; unchanged for the reference."""
    return (grad, x) if isinstance(backend_for(x, mask), Reference) else same_layout(grad, x)


def backward_sums(grad: Tensor, x: Tensor, statistics: ChannelStatistics, mask: Tensor | None = None) -> Tensor:
    """Σdy and Σdy·(x - mean) of a slice: shape (2, C), float64.

    Positions that the mask excludes are normalised too, so the sums include their gradients. If the loss leaves such a
    position out, its gradient is 0, and NaN or infinity in its input has no effect.
    """
    if x.numel() == 0:
        return zeros(2, x)
    return backend_for(x, mask).backward_sums(grad, x, statistics.beside(x))


def input_gradient(
    grad: Tensor,
    x: Tensor,
    statistics: ChannelStatistics,
    sums: Tensor,
    weight: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """dx, in the type of `x`; `sums` is the aggregate of `backward_sums` over all replicas.

    dx = invstd * weight * (dy - m·Σdy/n - m·(x - mean) * invstd² * slope * Σdy·(x - mean)/n), m = 1 where a position
    counts, else 0; `slope` as in `ChannelStatistics`.
    """
    check_parameter("weight", weight, x)
    statistics = statistics.beside(x)
    means = means_of(sums.to(vector_device(x), non_blocking=True), statistics)
    return backend_for(x, mask).input_gradient(grad, x, statistics, means, weight)


def means_of(sums: Tensor, statistics: ChannelStatistics) -> Tensor:
    """Σdy / n and slope * Σdy·(x - mean) / n for the sums over all replicas, shape (2, C)."""
    first, second = sums / statistics.count
    return torch.stack((first, second * statistics.slope))


def parameter_gradients(sums: Tensor, statistics: ChannelStatistics, x: Tensor, needs: Sequence[bool]) -> list[Any]:
    """Gradients of weight and bias, where needed, for the result of `backward_sums`; see `to_parameter`."""
    gradients = sums[1] * statistics.beside(sums).invstd, sums[0]
    return [to_parameter(values, x) if need else None for values, need in zip(gradients, needs, strict=True)]


def to_parameter(values: Tensor, x: Tensor) -> Tensor:
    """Copy of a float64 vector in the compute type of `x`, on its device."""
    (converted,) = to_compute_type(x, values.to(vector_device(x), non_blocking=True))
    return converted.clone() if converted.dtype == values.dtype else converted


def zeros(number: int, x: Tensor) -> Tensor:
    """`number` vectors of zeros, shape (number, C), float64."""
    return torch.zeros(number, x.shape[1], dtype=torch.float64, device=vector_device(x))


@dataclass(frozen=True, slots=True)
class SecondOrder:
    """The gradient of the gradient of one slice, for penalties on gradients such as WGAN-GP's.

    The first backward is dx = w·s·(g - m·b/n - m·c·s²·z·B/n), dw = s·Σg·z and dbias = Σg, where z is x - mean, s is
    invstd, c the slope, n the count, m is 1 where a position counts, else 0, and b and B are Σg and Σg·z over all
    replicas. The second backward receives v, u and t, the gradients by dx, dw and dbias, and has a round of five sums.
    """

    statistics: ChannelStatistics  # on the device of the vectors of x
    local_first: Tensor  # this replica's Σg and Σg·z, shape (2, C)
    grad: Tensor  # g, shape (N, C, *)
    input: Tensor  # x, same shape
    weight: Tensor | None  # w, shape (C,); None for 1
    mask: Tensor | None  # shape (N, *), bool
    by_input: Tensor | None  # v, the shape of x; None if the first backward had no dx, and so no round
    by_weight: Tensor | None  # u, shape (C,); None for 0
    by_bias: Tensor | None  # t, shape (C,); None for 0

    def sums(self) -> Tensor:
        """Σv·g, Σm·v, Σm·v·z, u·Σg and u·Σg·z of this replica: shape (5, C)."""
        x = self.input
        if x.numel() == 0:
            return zeros(5, x)
        by_weight = self._vector(self.by_weight, 0.0)
        center, rest = rounded(self.statistics, compute_type(x))
        assert self.by_input is not None  # noqa: S101 - the first backward had a round
        by_input = self.by_input.to(compute_type(x))
        counted, deviations = where(self.mask, by_input), where(self.mask, minus(x, center))
        sums = total(by_input * self.grad), total(counted), total(counted * deviations)
        product, sum_, moment = to_float64(x, *sums)
        return torch.stack((product, sum_, moment - rest * sum_, *(by_weight * self.local_first)))

    def without_input(self) -> Tensor:
        """Gradient of g where the first backward had only dw and dbias."""
        by_weight, by_bias = self._vector(self.by_weight, 0.0), self._vector(self.by_bias, 0.0)
        return affine(self.input, self.statistics, self.statistics.invstd * by_weight, by_bias).to(self.grad.dtype)

    def gradients(self, first: Tensor, second: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of g, x and w.

        `first` holds b and B, `second` the aggregate of `sums`, and `local` this replica's `sums`.
        """
        assert self.by_input is not None  # noqa: S101 - the first backward had a round
        x, statistics = self.input, self.statistics
        first, second, local = (each.to(vector_device(x), non_blocking=True) for each in (first, second, local))
        n, invstd, weight = statistics.count, statistics.invstd, self._vector(self.weight, 1.0)
        by_weight, by_bias = self._vector(self.by_weight, 0.0), self._vector(self.by_bias, 0.0)
        grads, moments = first  # b and B
        products, totals, second_moments, weighted_grads, weighted_moments = second
        cubic = statistics.slope * (invstd * invstd * invstd) / n
        square = statistics.slope * (invstd * invstd) / n
        # The mixed derivative by g and x, equal in both orders.
        mixed = invstd * by_weight - weight * cubic * second_moments
        by_centred = -weight * cubic * (products - totals * grads / n - 3 * square * second_moments * moments)
        by_centred = by_centred - cubic * weighted_moments
        constant = weight * cubic * (moments * totals + second_moments * grads) / n - invstd * weighted_grads / n

        grad_of_grad = affine(x, statistics, mixed, by_bias - weight * invstd * totals / n)
        grad_of_grad.add_(scaled(self.by_input, weight * invstd))
        counted = affine(x, statistics, by_centred, constant)
        counted.add_(scaled(self.by_input, -weight * cubic * moments))
        grad_of_input = where(self.mask, counted).add_(scaled(self.grad, mixed))
        grad_of_weight = invstd * (local[0] - local[1] * grads / n - square * local[2] * moments)
        of_weight = None if self.weight is None else to_parameter(grad_of_weight, x)
        return grad_of_grad.to(self.grad.dtype), grad_of_input.to(x.dtype), of_weight

    def _vector(self, parameter: Tensor | None, default: float) -> Tensor:
        """Float64 vector of a parameter or its gradient; filled with `default` for None."""
        if parameter is None:
            return torch.full_like(self.statistics.mean, default)
        return to_float64(parameter, parameter.detach())[0]
