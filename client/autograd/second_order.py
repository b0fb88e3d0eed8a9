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
from typing import Any

from torch import Tensor

from client.kernels import elementwise

VECTORS = 5


@dataclass(frozen=True, slots=True)
class SecondOrder:
    """One replica's part in a second backward.

    Attributes:
        kernels: `on_host` or `on_device`, by where the vectors are.
        grad: g, shape (N, C, *).
        input: x, same shape.
        weight: w, shape (C,), or None for 1.
        mask: shape (N, *), bool, or None.
        first: shape (2, C): this replica's Σg and Σg·z, where its vectors are.
        by_input: v, the shape of x; None if the first backward gave no dx, and so took no round.
        by_weight: u, shape (C,), or None for 0.
        by_bias: t, shape (C,), or None for 0.
    """

    kernels: Any
    grad: Tensor
    input: Tensor
    weight: Tensor | None
    mask: Tensor | None
    first: Any
    by_input: Tensor | None
    by_weight: Tensor | None
    by_bias: Tensor | None

    def sums(self, statistics: Any) -> Any:
        """Returns Σv·g, Σm·v, Σm·v·z, u·Σg and u·Σg·z of this replica: shape (5, C)."""
        kernels = self.kernels
        if self.input.numel() == 0:
            return kernels.zeros(VECTORS, self.input)
        statistics, _ = kernels.near(self.input, statistics)
        by_weight = kernels.parameter(self.by_weight, 0.0, statistics)
        centred, rest = kernels.centred(self.input, statistics)
        assert self.by_input is not None  # noqa: S101 - see its description
        by_input = self.by_input.to(centred.dtype)
        counted = elementwise.where(self.mask, by_input)
        product, total, moment = kernels.rows(
            elementwise.total(by_input * self.grad),
            elementwise.total(counted),
            elementwise.total(counted * elementwise.where(self.mask, centred)),
        )
        return kernels.stack((product, total, moment - rest * total, *(by_weight * self.first)))

    def without_input(self, statistics: Any) -> Tensor:
        """Returns the gradient of g where the first backward gave dw and dbias only."""
        kernels, x = self.kernels, self.input
        statistics, _ = kernels.near(x, statistics)
        by_weight = kernels.parameter(self.by_weight, 0.0, statistics)
        by_bias = kernels.parameter(self.by_bias, 0.0, statistics)
        found: Tensor = kernels.affine(x, statistics, statistics.invstd * by_weight, by_bias)
        return found.to(self.grad.dtype)

    def gradients(self, statistics: Any, first: Any, second: Any, local: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the gradients of g, x and w.

        Args:
            statistics: of the forward round.
            first: shape (2, C): b and B.
            second: shape (5, C): the aggregate of `sums`.
            local: shape (5, C): this replica's `sums`.
        """
        assert self.by_input is not None  # noqa: S101 - see its description
        kernels, x = self.kernels, self.input
        statistics, (first, second, local) = kernels.near(x, statistics, first, second, local)
        n, invstd = statistics.count, statistics.invstd
        weight, by_weight, by_bias = (
            kernels.parameter(self.weight, 1.0, statistics),
            kernels.parameter(self.by_weight, 0.0, statistics),
            kernels.parameter(self.by_bias, 0.0, statistics),
        )
        grads, moments = first
        products, totals, second_moments, weighted_grads, weighted_moments = second
        # No powers: numpy and torch round them differently.
        cubic = statistics.slope * (invstd * invstd * invstd) / n
        square = statistics.slope * (invstd * invstd) / n
        # What g gives x and x gives g: the same, as in any second derivative.
        mixed = invstd * by_weight - weight * cubic * second_moments
        by_centred = -weight * cubic * (products - totals * grads / n - 3 * square * second_moments * moments)
        by_centred = by_centred - cubic * weighted_moments
        constant = weight * cubic * (moments * totals + second_moments * grads) / n - invstd * weighted_grads / n

        grad_of_grad: Tensor = kernels.affine(x, statistics, mixed, by_bias - weight * invstd * totals / n)
        grad_of_grad.add_(kernels.scaled(self.by_input, weight * invstd))
        counted: Tensor = kernels.affine(x, statistics, by_centred, constant)
        counted.add_(kernels.scaled(self.by_input, -weight * cubic * moments))
        grad_of_input = elementwise.where(self.mask, counted).add_(kernels.scaled(self.grad, mixed))
        grad_of_weight = invstd * (local[0] - local[1] * grads / n - square * local[2] * moments)
        return (
            grad_of_grad.to(self.grad.dtype),
            grad_of_input.to(x.dtype),
            None if self.weight is None else kernels.vector(grad_of_weight, x),
        )
