"""The gradient of the gradient, for penalties on gradients such as WGAN-GP's.

The first backward is dx = w·s·(g - m·b/n - m·c·s²·z·B/n), dw = s·Σg·z and dbias = Σg, where

    g   the output's gradient             z   x - mean              m   1 where a position counts, else 0
    w   weight                            s   invstd                c   slope: 1, or 0 where "clamp" holds invstd
    b   Σg over all replicas              B   Σg·z over all replicas
    n   the count

Here v, u and t are the gradients of dx, dw and dbias. Differentiating once more gives sums over all replicas again,
five of them, so a second backward takes one round too.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from client.kernels import elementwise, vectors
from client.kernels.statistics import Statistics
from statsd_bn.reduction import FloatArray

VECTORS = 5


@dataclass(frozen=True, slots=True)
class SecondOrder:
    """One replica's part in a second backward.

    Attributes:
        grad: g, shape (N, C, *).
        input: x, same shape.
        weight: w, shape (C,), or None for 1.
        mask: shape (N, *), bool, or None.
        first: shape (2, C): this replica's Σg and Σg·z.
        by_input: v, the shape of x; None if the first backward gave no dx, and so took no round.
        by_weight: u, shape (C,), or None for 0.
        by_bias: t, shape (C,), or None for 0.
    """

    grad: Tensor
    input: Tensor
    weight: Tensor | None
    mask: Tensor | None
    first: FloatArray
    by_input: Tensor | None
    by_weight: Tensor | None
    by_bias: Tensor | None

    def sums(self, statistics: Statistics) -> FloatArray:
        """Returns Σv·g, Σm·v, Σm·v·z, u·Σg and u·Σg·z of this replica: shape (5, C)."""
        by_weight = _host(self.by_weight, 0.0, self.first[0])
        if self.input.numel() == 0:
            return np.zeros((VECTORS, self.input.shape[1]))
        centred, rest = elementwise.centred(self.input, statistics)
        assert self.by_input is not None  # noqa: S101 - see its description
        by_input = self.by_input.to(centred.dtype)
        counted = elementwise.where(self.mask, by_input)
        product, total, moment = vectors.to_host(
            elementwise.total(by_input * self.grad),
            elementwise.total(counted),
            elementwise.total(counted * elementwise.where(self.mask, centred)),
        )
        return np.stack((product, total, moment - rest * total, *(by_weight * self.first)))

    def without_input(self, statistics: Statistics) -> Tensor:
        """Returns the gradient of g where the first backward gave dw and dbias only."""
        by_weight, by_bias = _host(self.by_weight, 0.0, self.first[0]), _host(self.by_bias, 0.0, self.first[0])
        return elementwise.affine(self.input, statistics, statistics.invstd * by_weight, by_bias).to(self.grad.dtype)

    def gradients(
        self, statistics: Statistics, first: FloatArray, second: FloatArray, local: FloatArray
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the gradients of g, x and w.

        Args:
            statistics: of the forward round.
            first: shape (2, C): b and B.
            second: shape (5, C): the aggregate of `sums`.
            local: shape (5, C): this replica's `sums`.
        """
        assert self.by_input is not None  # noqa: S101 - see its description
        x, n, invstd = self.input, statistics.count, statistics.invstd
        like = statistics.mean
        weight, by_weight, by_bias = (
            _host(self.weight, 1.0, like),
            _host(self.by_weight, 0.0, like),
            _host(self.by_bias, 0.0, like),
        )
        grads, moments = first
        products, totals, second_moments, weighted_grads, weighted_moments = second
        cubic = statistics.slope * invstd**3 / n
        square = statistics.slope * invstd**2 / n
        # What g gives x and x gives g: the same, as in any second derivative.
        mixed = invstd * by_weight - weight * cubic * second_moments
        by_centred = -weight * cubic * (products - totals * grads / n - 3 * square * second_moments * moments)
        by_centred = by_centred - cubic * weighted_moments
        constant = weight * cubic * (moments * totals + second_moments * grads) / n - invstd * weighted_grads / n

        grad_of_grad = elementwise.affine(x, statistics, mixed, by_bias - weight * invstd * totals / n)
        grad_of_grad.add_(elementwise.scaled(self.by_input, weight * invstd))
        counted = elementwise.affine(x, statistics, by_centred, constant)
        counted.add_(elementwise.scaled(self.by_input, -weight * cubic * moments))
        grad_of_input = elementwise.where(self.mask, counted).add_(elementwise.scaled(self.grad, mixed))
        grad_of_weight = invstd * (local[0] - local[1] * grads / n - square * local[2] * moments)
        return (
            grad_of_grad.to(self.grad.dtype),
            grad_of_input.to(x.dtype),
            None if self.weight is None else vectors.vector(grad_of_weight, x),
        )


def _host(vector: Tensor | None, default: float, like: FloatArray) -> FloatArray:
    """Returns a parameter-like vector as float64 on the host."""
    if vector is None:
        return np.full_like(like, default)
    return vectors.on_host(vector)
