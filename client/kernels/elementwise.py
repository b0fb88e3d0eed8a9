"""Torch's elementwise operators, which every device has: for all that no faster backend takes, such as masks.

A slice is always centred before it is squared or scaled: `x - center` is nearly exact in float32 even where
`mean / std` is 10,000, while `a*x + b` would lose the digits that matter. What the rounding of the centre leaves over
(`mean - center`) is put back in float64.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from client.kernels.layout import laid_out
from client.kernels.statistics import Statistics
from client.kernels.vectors import along_channels, compute_type, to_device, to_host, vector
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray, quietly


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """The backend that takes everything.

    Attributes:
        mask: shape (N, *), bool: which positions count for the statistics; None for all.
    """

    mask: Tensor | None = None

    def takes(self, x: Tensor) -> bool:  # noqa: ARG002 - the contract's
        """Takes any floating-point type on any device, also an empty slice."""
        return True

    def moments(self, x: Tensor, number: int) -> Moments:
        """Takes the mean first, then sums of the centred values."""
        values = where(self.mask, x.to(compute_type(x)))
        center = total(values) / number
        deviations = where(self.mask, values - along_channels(center, x))
        return around(number, *to_host(center, total(deviations), total(deviations.square())))

    def normalise(self, x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalises masked positions like the rest."""
        return affine(x, statistics, statistics.invstd, np.zeros_like(statistics.mean), weight, bias).to(x.dtype)

    def for_backward(self, grad: Tensor, x: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - the interface's
        """Returns both as they are: they may lie anyhow."""
        return grad, x

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: Statistics) -> FloatArray:
        """Leaves out masked positions only where their gradient is 0, see `dispatch.backward_sums`."""
        if x.numel() == 0:
            return np.zeros((2, x.shape[1]))
        grad = grad.to(compute_type(x))
        deviations, rest = centred(x, statistics)
        if self.mask is not None:
            deviations = deviations.masked_fill(~self.mask.unsqueeze(1) & (grad == 0), 0)
        first, second = to_host(total(grad), total(deviations.mul_(grad)))
        return np.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: Statistics, means: FloatArray, weight: Tensor | None
    ) -> Tensor:
        """Lets the statistics' gradient flow only into positions that count."""
        invstd = statistics.invstd
        slope = invstd * invstd * means[1]
        through_statistics = where(self.mask, affine(x, statistics, -invstd * slope, -invstd * means[0], weight))
        return through_statistics.add_(scaled(grad, invstd, weight)).to(x.dtype)


def around(number: int, center: FloatArray, first: FloatArray, second: FloatArray) -> Moments:
    """Returns the moments of values whose Σ(x - center) and Σ(x - center)² these are; shape (C,).

    An infinite center is the mean of what has infinity in it: the difference of the two would be NaN.
    """
    mean = np.where(np.isinf(center), center, center + first / number)
    return Moments.from_centred(number, mean, second - first * first / number)


@quietly
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
    rest = constant - by_centred * (statistics.mean - center)
    device_center, factor, addend = to_device(x, center, by_centred, rest)
    if weight is not None:
        factor, addend = factor * weight, addend * weight
    if bias is not None:
        addend = addend + bias
    deviations = laid_out(x.to(compute_type(x)) - along_channels(device_center, x))
    return deviations.mul_(along_channels(factor, x)).add_(along_channels(addend, x))


def scaled(x: Tensor, factor: FloatArray, weight: Tensor | None = None) -> Tensor:
    """Returns x * factor * weight; vectors of shape (C,)."""
    by = vector(factor, x)
    return x * along_channels(by if weight is None else by * weight, x)


def centred(x: Tensor, statistics: Statistics) -> tuple[Tensor, FloatArray]:
    """Returns x - center in the compute type, and mean - center in float64, shape (C,)."""
    center = statistics.center(x)
    return x.to(compute_type(x)) - along_channels(vector(center, x), x), statistics.mean - center


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
