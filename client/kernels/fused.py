"""`cuda` once more, with vectors that stay on the device: the fused operators of torch's own SyncBatchNorm.

Where `cuda` looks at the mean to see whether it is near zero, nobody can look here. So all values are measured a second
time, around the mean, which finds what its rounding to float32 has left: no digit is lost, but the input is read twice
more.
"""

import torch
from torch import Tensor

from client.kernels.cuda import reduced, weight_of
from client.kernels.device_elementwise import center_and_rest
from client.kernels.device_statistics import DeviceMoments, DeviceStatistics
from client.kernels.layout import alike, dense
from client.kernels.vectors import along_channels, compute_type


def takes(x: Tensor, mask: Tensor | None) -> bool:
    """Whether a slice that is not empty may come here."""
    return x.is_cuda and mask is None


class Fused:
    """The backend for CUDA, without masks."""

    def moments(self, x: Tensor) -> DeviceMoments:
        """Takes the mean first, then mean and variance of the centred values."""
        x = dense(x)
        center, _ = torch.batch_norm_update_stats(x, None, None, 0.0)
        rest, variance = torch.batch_norm_update_stats(x - along_channels(center, x), None, None, 0.0)
        number = x.numel() // x.shape[1]
        center = center.double()
        # An infinite center is the mean of what has infinity in it: the difference of the two would be NaN.
        mean = torch.where(center.isinf(), center, center + rest.double())
        return DeviceMoments.from_centred(number, mean, variance.double() * number, x)

    def normalise(self, x: Tensor, statistics: DeviceStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Puts what the rounding of the mean has left over into the bias."""
        x, wide = dense(x), compute_type(x)
        center, rest = center_and_rest(x, statistics)
        weight = weight_of(x, weight)
        addend = (-rest * statistics.invstd).to(wide) * weight
        if bias is not None:
            addend = (addend + bias.detach()).to(wide)  # one of a wider type would make the sum so wide
        return torch.batch_norm_elemt(x, weight, addend, center, statistics.invstd.to(wide), 0.0)

    def for_backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both alike."""
        return alike(grad, x)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: DeviceStatistics) -> Tensor:
        """Returns Σdy and Σdy·(x - mean), shape (2, C)."""
        grad, x = alike(grad, x)
        center, rest = center_and_rest(x, statistics)
        invstd = statistics.invstd.to(compute_type(x))
        first, second = (each.double() for each in reduced(grad, x, center, invstd))
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: DeviceStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """As `cuda.input_gradient`."""
        grad, x = alike(grad, x)
        wide = compute_type(x)
        center, rest = center_and_rest(x, statistics)
        invstd = statistics.invstd
        first = means[0] - rest * (invstd * invstd * means[1])
        # The operator would divide sums by a count of 32 bits.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            grad, x, center, invstd.to(wide), weight_of(x, weight), first.to(wide), means[1].to(wide), one
        )
