"""Statistics: what the moments of the whole batch say of each channel."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from client.kernels.vectors import compute_type
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray, quietly

# In float32 `a*x + b` is off by up to mean/std * 2^-24 of a standard deviation: with this by 10^-6.
NEAR_ZERO = 16.0


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
    @quietly
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
        return cls(moments.count, moments.mean, 1 / np.sqrt(variance + eps), _ones(len(variance)))

    @cached_property
    def is_near_zero(self) -> bool:
        """Whether every mean is so few standard deviations from 0 that x need not be centred before it is scaled."""
        return _are_near_zero(self.mean, self.invstd)

    def center(self, like: Tensor) -> FloatArray:
        """Returns the mean rounded to the compute type of `like`."""
        rounded = torch.from_numpy(self.mean).to(compute_type(like))
        return rounded.to(torch.float64).numpy()


@lru_cache(maxsize=64)
def _ones(channels: int) -> FloatArray:
    ones = np.ones(channels)
    ones.flags.writeable = False
    return ones


@quietly
def _are_near_zero(mean: FloatArray, invstd: FloatArray) -> bool:
    return bool((np.abs(mean) * invstd <= NEAR_ZERO).all())  # NaN is not near
