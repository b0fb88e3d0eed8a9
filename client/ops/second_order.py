"""The gradient of the gradient, for penalties on gradients such as WGAN-GP's.

The first backward is dx = w·s·(g - m·b/n - m·c·s²·z·B/n), dw = s·Σg·z and dbias = Σg, where

    g   the output's gradient             z   x - mean              m   1 where a position counts, else 0
    w   weight                            s   invstd                c   slope: 1, or 0 where "clamp" holds invstd
    b   Σg over all replicas              B   Σg·z over all replicas
    n   the count

The second backward receives v, u and t, the gradients by dx, dw and dbias, and needs a round for five sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from client.ops import engine
from client.ops.reference import affine, centred, scaled, total, where
from client.ops.statistics import ChannelStatistics, to_float64, vector_device

VECTORS = 5


@dataclass(frozen=True, slots=True)
class SecondOrder:
    """The second backward of one replica."""

    statistics: ChannelStatistics  # on the device of the vectors of x
    grad: Tensor  # g, shape (N, C, *)
    input: Tensor  # x, same shape
    weight: Tensor | None  # w, shape (C,); None for 1
    mask: Tensor | None  # shape (N, *), bool
    local_first: Tensor  # this replica's Σg and Σg·z, shape (2, C)
    by_input: Tensor | None  # v, the shape of x; None if the first backward had no dx, and so no round
    by_weight: Tensor | None  # u, shape (C,); None for 0
    by_bias: Tensor | None  # t, shape (C,); None for 0

    def sums(self) -> Tensor:
        """Σv·g, Σm·v, Σm·v·z, u·Σg and u·Σg·z of this replica: shape (5, C)."""
        x = self.input
        if x.numel() == 0:
            return engine.zeros(VECTORS, x)
        by_weight = self._vector(self.by_weight, 0.0)
        deviations, rest = centred(x, self.statistics)
        assert self.by_input is not None  # noqa: S101 - the first backward had a round
        by_input = self.by_input.to(deviations.dtype)
        counted = where(self.mask, by_input)
        sums = total(by_input * self.grad), total(counted), total(counted * where(self.mask, deviations))
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
        of_weight = None if self.weight is None else engine.to_parameter(grad_of_weight, x)
        return grad_of_grad.to(self.grad.dtype), grad_of_input.to(x.dtype), of_weight

    def _vector(self, parameter: Tensor | None, default: float) -> Tensor:
        """Float64 vector of a parameter or its gradient; filled with `default` for None."""
        if parameter is None:
            return torch.full_like(self.statistics.mean, default)
        return to_float64(parameter, parameter.detach())[0]
