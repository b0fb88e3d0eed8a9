"""`elementwise` once more, with vectors that stay on the device of the slice: to the same bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from client.kernels.device_statistics import DeviceMoments, DeviceStatistics
from client.kernels.elementwise import total, where
from client.kernels.layout import laid_out
from client.kernels.vectors import along_channels, compute_type


@dataclass(frozen=True, slots=True, eq=False)
class DeviceElementwise:
    """The backend that takes everything; `Elementwise` says what it does.

    Attributes:
        mask: shape (N, *), bool: which positions count for the statistics; None for all.
    """

    mask: Tensor | None = None

    def moments(self, x: Tensor) -> DeviceMoments:
        """Takes the mean first, then sums of the centred values; `x` is not empty."""
        values = where(self.mask, x.to(compute_type(x)))
        number: int | Tensor = x.numel() // x.shape[1]
        if self.mask is not None:
            number = self.mask.sum(dtype=torch.float64)
        at_least_one = number.clamp(min=1) if isinstance(number, Tensor) else number
        center = total(values) / at_least_one
        deviations = where(self.mask, values - along_channels(center, x))
        first, second = total(deviations).double(), total(deviations.square()).double()
        center = center.double()
        # An infinite center is the mean of what has infinity in it: the difference of the two would be NaN.
        mean = torch.where(center.isinf(), center, center + first / at_least_one)
        return DeviceMoments.from_centred(number, mean, second - first * first / at_least_one, x)

    def normalise(self, x: Tensor, statistics: DeviceStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalises masked positions like the rest."""
        nothing = torch.zeros_like(statistics.mean)
        return affine(x, statistics, statistics.invstd, nothing, weight, bias).to(x.dtype)

    def for_backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both as they are: they may lie anyhow."""
        return grad, x

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: DeviceStatistics) -> Tensor:
        """Leaves out masked positions only where their gradient is 0, see `dispatch.backward_sums`."""
        grad = grad.to(compute_type(x))
        deviations, rest = centred(x, statistics)
        if self.mask is not None:
            deviations = deviations.masked_fill(~self.mask.unsqueeze(1) & (grad == 0), 0)
        first, second = total(grad).double(), total(deviations.mul_(grad)).double()
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: DeviceStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Lets the statistics' gradient flow only into positions that count."""
        invstd = statistics.invstd
        slope = invstd * invstd * means[1]
        through_statistics = where(self.mask, affine(x, statistics, -invstd * slope, -invstd * means[0], weight))
        return through_statistics.add_(scaled(grad, invstd, weight)).to(x.dtype)


def affine(
    x: Tensor,
    statistics: DeviceStatistics,
    by_centred: Tensor,
    constant: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns (by_centred * (x - mean) + constant) * weight + bias in the compute type, see `elementwise.affine`."""
    center, rest = center_and_rest(x, statistics)
    wide = compute_type(x)
    factor, addend = by_centred.to(wide), (constant - by_centred * rest).to(wide)
    if weight is not None:
        factor, addend = factor * weight, addend * weight
    if bias is not None:
        addend = addend + bias
    deviations = laid_out(x.to(wide) - along_channels(center, x))
    return deviations.mul_(along_channels(factor, x)).add_(along_channels(addend, x))


def scaled(x: Tensor, factor: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns x * factor * weight; vectors of shape (C,)."""
    by = factor.to(compute_type(x))
    return x * along_channels(by if weight is None else by * weight, x)


def centred(x: Tensor, statistics: DeviceStatistics) -> tuple[Tensor, Tensor]:
    """Returns x - center in the compute type, and mean - center in float64, shape (C,)."""
    center, rest = center_and_rest(x, statistics)
    return x.to(compute_type(x)) - along_channels(center, x), rest


def center_and_rest(x: Tensor, statistics: DeviceStatistics) -> tuple[Tensor, Tensor]:
    """Returns the mean in the compute type of `x`, and what its rounding left over, in float64."""
    center = statistics.mean.to(compute_type(x))
    return center, statistics.mean - center.double()
