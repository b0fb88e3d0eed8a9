"""The backend for CUDA: the fused operators of torch's SyncBatchNorm, with float64 statistics.

The moments are measured a second time around the mean, which finds the rounding error of the float32 mean: no digit is
lost, but the input is read twice more. To skip this for a mean near zero, the host would have to wait for the mean.
"""

import torch
from torch import Tensor

from client.ops.reference import rounded
from client.ops.statistics import ChannelMoments, ChannelStatistics, along_channels, compute_type, dense, same_layout

# Flags of the operator: the sums for the input's gradient, of which those for weight and bias are a part.
_FOR_THE_INPUT = (True, False, False)

_HALVES = frozenset({torch.float16, torch.bfloat16})


class Fused:
    """The backend for CUDA, without masks."""

    def supports(self, x: Tensor) -> bool:
        """Support all tensors on CUDA."""
        return x.is_cuda

    def moments(self, x: Tensor) -> ChannelMoments:
        """Compute the mean first, then mean and variance of the centred values."""
        x = dense(x)
        center, _ = torch.batch_norm_update_stats(x, None, None, 0.0)
        rest, variance = torch.batch_norm_update_stats(x - along_channels(center, x), None, None, 0.0)
        number = x.numel() // x.shape[1]
        center = center.double()
        # An infinite center is the mean of infinite values; adding the difference would give NaN.
        mean = torch.where(center.isinf(), center, center + rest.double())
        return ChannelMoments.from_centred(number, mean, variance.double() * number, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Add the rounding error of the mean to the bias."""
        x, wide = dense(x), compute_type(x)
        center, rest = rounded(statistics, wide)
        weight = _weight_of(x, weight)
        addend = (-rest * statistics.invstd).to(wide) * weight
        if bias is not None:
            addend = (addend + bias.detach()).to(wide)  # a wider bias would widen the sum
        return torch.batch_norm_elemt(x, weight, addend, center, statistics.invstd.to(wide), 0.0)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Compute the sums around the rounded mean, and correct its rounding error."""
        grad, x = same_layout(grad, x)
        center, rest = rounded(statistics, compute_type(x))
        invstd = statistics.invstd.to(compute_type(x))
        # In half precision torch's kernels, except those for channels_last, round partial sums.
        is_channels_last = x.stride(1) == 1 or x.numel() == x.shape[0] * x.shape[1]
        if x.dtype in _HALVES and not is_channels_last:
            grad, x = grad.float(), x.float()
        ones = _weight_of(x, None)
        first, second, *_ = torch.batch_norm_backward_reduce(grad, x, center, invstd, ones, *_FOR_THE_INPUT)
        first, second = first.double(), second.double()
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Add the rounding error of the mean to the mean of the gradient."""
        grad, x = same_layout(grad, x)
        invstd, wide = statistics.invstd, compute_type(x)
        center, rest = rounded(statistics, wide)
        first = means[0] - rest * (invstd * invstd * means[1])
        # `means` are divided already, because the operator's count has only 32 bits.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            grad, x, center, invstd.to(wide), _weight_of(x, weight), first.to(wide), means[1].to(wide), one
        )


def _weight_of(x: Tensor, weight: Tensor | None) -> Tensor:
    """A layer's weight, or ones: its type decides the types of the operators' statistics."""
    if weight is None:
        return torch.ones(x.shape[1], dtype=compute_type(x), device=x.device)
    return weight.detach().to(compute_type(x))
