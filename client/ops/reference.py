"""Torch's elementwise operators, which every device has: for all that no faster backend takes, such as masks.

A slice is always centred before it is squared or scaled: `x - center` is nearly exact in float32 even where
`mean / std` is 10,000, while `a*x + b` would lose the digits that matter. What the rounding of the centre leaves over
(`mean - center`) is put back in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from client.ops.layout import laid_out
from client.ops.statistics import ChannelMoments, ChannelStatistics, Count, at_least_one
from client.ops.vectors import along_channels, compute_type, narrow, widen


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The backend that takes everything.

    Attributes:
        mask: shape (N, *), bool: which positions count for the statistics; None for all.
    """

    mask: Tensor | None = None

    def takes(self, x: Tensor) -> bool:  # noqa: ARG002 - the contract's
        """Takes any floating-point type on any device, also an empty slice."""
        return True

    def moments(self, x: Tensor) -> ChannelMoments:
        """Takes the mean first, then sums of the centred values."""
        number = count(x, self.mask)
        least = at_least_one(number)
        values = where(self.mask, x.to(compute_type(x)))
        center = total(values) / (least if isinstance(least, int) else least.to(compute_type(x)).to(x.device))
        deviations = where(self.mask, values - along_channels(center, x))
        center, first, second = widen(x, center, total(deviations), total(deviations.square()))
        # An infinite center is the mean of what has infinity in it: the difference of the two would be NaN.
        mean = torch.where(center.isinf(), center, center + first / least)
        return ChannelMoments.from_centred(number, mean, second - first * first / least, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalises masked positions like the rest."""
        nothing = torch.zeros_like(statistics.mean)
        return affine(x, statistics, statistics.invstd, nothing, weight, bias).to(x.dtype)

    def for_backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both as they are: they may lie anyhow."""
        return grad, x

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Leaves out masked positions only where their gradient is 0, see `engine.backward_sums`."""
        grad = grad.to(compute_type(x))
        deviations, rest = centred(x, statistics)
        if self.mask is not None:
            deviations = deviations.masked_fill(~self.mask.unsqueeze(1) & (grad == 0), 0)
        first, second = widen(x, total(grad), total(deviations.mul_(grad)))
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Lets the statistics' gradient flow only into positions that count."""
        invstd = statistics.invstd
        slope = invstd * invstd * means[1]
        through_statistics = where(self.mask, affine(x, statistics, -invstd * slope, -invstd * means[0], weight))
        return through_statistics.add_(scaled(grad, invstd, weight)).to(x.dtype)


def count(x: Tensor, mask: Tensor | None) -> Count:
    """Returns how many values per channel count for the statistics."""
    if mask is None:
        return x.numel() // x.shape[1]
    # Booleans have a sum that is exact on every device.
    return widen(x, mask.sum())[0]


def affine(
    x: Tensor,
    statistics: ChannelStatistics,
    by_centred: Tensor,
    constant: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns (by_centred * (x - mean) + constant) * weight + bias in the compute type; vectors of shape (C,).

    It lies in memory as torch's batch norm would put it: channels_last if `x` does, else contiguous.
    """
    rounded, rest = _rounded(x, statistics)
    center, factor, addend = narrow(x, rounded, by_centred, constant - by_centred * rest)
    if weight is not None:
        factor, addend = factor * weight, addend * weight
    if bias is not None:
        addend = addend + bias
    deviations = laid_out(x.to(compute_type(x)) - along_channels(center, x))
    return deviations.mul_(along_channels(factor, x)).add_(along_channels(addend, x))


def scaled(x: Tensor, factor: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns x * factor * weight; vectors of shape (C,)."""
    (by,) = narrow(x, factor)
    return x * along_channels(by if weight is None else by * weight, x)


def centred(x: Tensor, statistics: ChannelStatistics) -> tuple[Tensor, Tensor]:
    """Returns x - center in the compute type, and mean - center in float64, shape (C,)."""
    rounded, rest = _rounded(x, statistics)
    (center,) = narrow(x, rounded)
    return x.to(compute_type(x)) - along_channels(center, x), rest


def _rounded(x: Tensor, statistics: ChannelStatistics) -> tuple[Tensor, Tensor]:
    """Returns the mean rounded to the compute type of `x`, and what that left over, both as float64."""
    rounded = statistics.mean.to(compute_type(x)).double()
    return rounded, statistics.mean - rounded


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
