"""Moments: what a batch says of each channel, as sums that can be added.

A replica measures its slice stably, as a mean and a sum of squares centred at that mean (Chan, Golub & LeVeque,
"Algorithms for computing the sample variance", 1983). Only here, in float64, does it become the sums that
travel: the subtraction that turns them back into a variance then costs a relative error near
2^-53 * mean^2 / var, where in float32 it would cost 2^-24 * mean^2 / var, which at mean/std = 10,000
leaves nothing.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from statsd_bn.reduction import FloatArray, quietly, sum_in_order


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, sums and sums of squares per channel.

    Attributes:
        count: values per channel, an exact integer >= 0.
        sums: shape (C,), float64: Σx.
        squares: shape (C,), float64: Σx².
    """

    count: int
    sums: FloatArray
    squares: FloatArray

    @classmethod
    def empty(cls, channels: int) -> Self:
        """Returns the identity of `merge`: the moments of no values."""
        return cls(0, np.zeros(channels), np.zeros(channels))

    @classmethod
    def from_centred(cls, count: int, mean: FloatArray, centred: FloatArray) -> Self:
        """Returns the moments of `count` values with this mean and Σ(x - mean)², each of shape (C,)."""
        return cls(count, count * mean, centred + count * mean * mean)

    @classmethod
    def from_vectors(cls, count: int, vectors: FloatArray) -> Self:
        """Returns the moments that `vectors` of shape (2, C) carry."""
        return cls(count, vectors[0], vectors[1])

    @property
    def vectors(self) -> FloatArray:
        """The form that travels: shape (2, C), sums above squares."""
        return np.stack((self.sums, self.squares))

    def merge(self, other: Self) -> Self:
        """Returns the moments of both batches together."""
        return type(self)(
            self.count + other.count,
            sum_in_order((self.sums, other.sums)),
            sum_in_order((self.squares, other.squares)),
        )

    @cached_property
    def mean(self) -> FloatArray:
        """Shape (C,): Σx / n. Needs count >= 1."""
        return self.sums / self.count

    def variance(self, *, unbiased: bool = False) -> FloatArray:
        """Returns the variance per channel, never below 0.

        Args:
            unbiased: divide by n - 1 (what `running_var` keeps; needs count >= 2) rather than by n (what
                normalises; needs count >= 1).

        Returns:
            Shape (C,). NaN where the input held NaN.
        """
        return self.centred / (self.count - unbiased)

    @cached_property
    def centred(self) -> FloatArray:
        """Shape (C,): Σ(x - mean)², never below 0. NaN where the input held NaN."""
        return _centred(self.count, self.sums, self.squares)


@quietly
def _centred(count: int, sums: FloatArray, squares: FloatArray) -> FloatArray:
    return np.maximum(squares - sums * sums / count, 0.0)
