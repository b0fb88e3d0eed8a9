"""Torch's elementwise operators, which every device has: for all that no faster backend takes, such as masks.

A slice is always centred before it is squared or scaled: `x - center` is nearly exact in float32 even where
`mean / std` is 10,000, while `a*x + b` would lose the digits that matter. What the rounding of the centre leaves over
(`mean - center`) is put back in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client.ops.statistics import ChannelMoments, ChannelStatistics, at_least_one
from client.ops.vectors import along_channels, compute_type, home, laid_out, narrow, widen
from client.transports.device_rows import Count


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
        """Takes the sums around the rounded mean, and takes off what its rounding makes of them."""
        return self.sums_around(*_rounded(statistics, compute_type(x)), grad, x)

    def sums_around(self, center: Tensor, rest: Tensor, grad: Tensor, x: Tensor) -> Tensor:
        """Returns the same for a mean in the compute type and what its rounding left over, each of shape (C,).

        It leaves out masked positions only where their gradient is 0, see `engine.backward_sums`.
        """
        grad = grad.to(compute_type(x))
        deviations = _minus(x, center)
        if self.mask is not None:
            deviations = deviations.masked_fill(~self.mask.unsqueeze(1) & (grad == 0), 0)
        first, second = self._totals(x, grad, deviations.mul_(grad))
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Lets the statistics' gradient flow only into positions that count."""
        return self.gradient(grad, x, statistics.invstd, slopes(statistics, means, compute_type(x)), weight)

    def gradient(self, grad: Tensor, x: Tensor, invstd: Tensor, slopes: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the same by vectors that are made already: `slopes` by the function of this name."""
        through_statistics = where(self.mask, applied(x, slopes, weight))
        return through_statistics.add_(scaled(grad, invstd, weight)).to(x.dtype)

    def _totals(self, x: Tensor, *values: Tensor) -> Sequence[Tensor]:
        """Returns the sums per channel of values of the shape of `x`, each of shape (C,), float64."""
        return widen(x, *map(total, values))


class Traced(Reference):
    """The same for a compiler, which fuses a conversion with the sum: then float64 from the first value on is cheap."""

    __slots__ = ()

    def moments(self, x: Tensor) -> ChannelMoments:
        """Reads the input once, where its device has float64."""
        if home(x) != x.device:
            return super().moments(x)
        values = where(self.mask, x.double())
        sums, squares = self._totals(x, values, values.square())
        return ChannelMoments(count(x, self.mask), sums, squares, tuple(x.shape))

    def _totals(self, x: Tensor, *values: Tensor) -> Sequence[Tensor]:
        if home(x) != x.device:
            return super()._totals(x, *values)
        return [each.double().sum([0, *range(2, x.dim())]) for each in values]


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
    return applied(x, vectors(statistics, by_centred, constant, compute_type(x)), weight, bias)


def vectors(statistics: ChannelStatistics, by_centred: Tensor, constant: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the vectors for `applied` of which `affine` is made, shape (3, C), where the statistics are."""
    center, rest = _rounded(statistics, dtype)
    return torch.stack((center, by_centred.to(dtype), (constant - by_centred * rest).to(dtype)))


def slopes(statistics: ChannelStatistics, means: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the vectors for `applied` that give the gradient through the statistics, see `Backend.input_gradient`."""
    invstd = statistics.invstd
    return vectors(statistics, -invstd * (invstd * invstd * means[1]), -invstd * means[0], dtype)


def applied(x: Tensor, vectors: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Returns ((x - center) * factor + addend) * weight + bias for the three `vectors`, shape (3, C)."""
    center, factor, addend = vectors.to(x.device, non_blocking=True).unbind()
    if weight is not None:
        factor, addend = factor * weight, addend * weight
    if bias is not None:
        addend = addend + bias
    deviations = laid_out(_minus(x, center))
    return deviations.mul_(along_channels(factor, x)).add_(along_channels(addend, x))


def scaled(x: Tensor, factor: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns x * factor * weight; vectors of shape (C,)."""
    (by,) = narrow(x, factor)
    return x * along_channels(by if weight is None else by * weight, x)


def centred(x: Tensor, statistics: ChannelStatistics) -> tuple[Tensor, Tensor]:
    """Returns x - center in the compute type, and mean - center in float64, shape (C,)."""
    center, rest = _rounded(statistics, compute_type(x))
    return _minus(x, center), rest


def _rounded(statistics: ChannelStatistics, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the mean rounded to a type, and what that left over, in float64."""
    center = statistics.mean.to(dtype)
    return center, statistics.mean - center.double()


def _minus(x: Tensor, center: Tensor) -> Tensor:
    return x.to(compute_type(x)) - along_channels(center.to(x.device, non_blocking=True), x)


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
