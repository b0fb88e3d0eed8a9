"""On CUDA: the fused operators of torch's own SyncBatchNorm, fed with our statistics.

All values are measured a second time, around the mean, which finds what its rounding to float32 has left: no digit is
lost, but the input is read twice more. To look first whether the mean is near zero would wait for the device.
"""

import torch
from torch import Tensor

from client.ops.statistics import ChannelMoments, ChannelStatistics
from client.ops.vectors import alike, along_channels, compute_type, dense

# Which of the sums to take: those for the input's gradient hold those for weight and bias.
_FOR_THE_INPUT = (True, False, False)

_HALVES = frozenset({torch.float16, torch.bfloat16})


class Fused:
    """The backend for CUDA, without masks."""

    def takes(self, x: Tensor) -> bool:
        """Takes what is on CUDA; it is not empty."""
        return x.is_cuda

    def moments(self, x: Tensor) -> ChannelMoments:
        """Takes the mean first, then mean and variance of the centred values."""
        x = dense(x)
        center, _ = torch.batch_norm_update_stats(x, None, None, 0.0)
        rest, variance = torch.batch_norm_update_stats(x - along_channels(center, x), None, None, 0.0)
        number = x.numel() // x.shape[1]
        center = center.double()
        # An infinite center is the mean of what has infinity in it: the difference of the two would be NaN.
        mean = torch.where(center.isinf(), center, center + rest.double())
        return ChannelMoments.from_centred(number, mean, variance.double() * number, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Puts what the rounding of the mean has left over into the bias."""
        x, wide = dense(x), compute_type(x)
        center, rest = _center_and_rest(x, statistics)
        weight = _weight_of(x, weight)
        addend = (-rest * statistics.invstd).to(wide) * weight
        if bias is not None:
            addend = (addend + bias.detach()).to(wide)  # one of a wider type would make the sum so wide
        return torch.batch_norm_elemt(x, weight, addend, center, statistics.invstd.to(wide), 0.0)

    def for_backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both alike."""
        return alike(grad, x)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Takes the sums around the rounded mean, and takes off what its rounding makes of them."""
        grad, x = alike(grad, x)
        center, rest = _center_and_rest(x, statistics)
        invstd = statistics.invstd.to(compute_type(x))
        first, second = (each.double() for each in _reduced(grad, x, center, invstd))
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Puts what the rounding of the mean has left over into the mean of the gradient."""
        grad, x = alike(grad, x)
        wide = compute_type(x)
        center, rest = _center_and_rest(x, statistics)
        invstd = statistics.invstd
        first = means[0] - rest * (invstd * invstd * means[1])
        # The operator would divide sums by a count of 32 bits.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            grad, x, center, invstd.to(wide), _weight_of(x, weight), first.to(wide), means[1].to(wide), one
        )


def _center_and_rest(x: Tensor, statistics: ChannelStatistics) -> tuple[Tensor, Tensor]:
    """Returns the mean in the compute type of `x`, and what its rounding left over, in float64."""
    center = statistics.mean.to(compute_type(x))
    return center, statistics.mean - center.double()


def _reduced(grad: Tensor, x: Tensor, center: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Σdy and Σdy·(x - center), each of shape (C,), in the compute type.

    Torch's kernel for contiguous inputs in half precision rounds partial sums to half precision, that for channels_last
    does not. So the former are copied to float32.
    """
    if x.dtype in _HALVES and not _is_channels_last(x):
        grad, x = grad.float(), x.float()
    first, second, *_ = torch.batch_norm_backward_reduce(grad, x, center, invstd, _weight_of(x, None), *_FOR_THE_INPUT)
    return first, second


def _is_channels_last(x: Tensor) -> bool:
    """Whether torch takes its kernels for channels_last for a dense `x`."""
    return x.stride(1) == 1 or x.numel() == x.shape[0] * x.shape[1]


def _weight_of(x: Tensor, weight: Tensor | None) -> Tensor:
    """Returns a layer's weight, or ones: the operators take the types of their statistics from the weight's."""
    if weight is None:
        return torch.ones(x.shape[1], dtype=compute_type(x), device=x.device)
    return weight.detach().to(compute_type(x))
