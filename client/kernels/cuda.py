"""On CUDA: the fused operators of torch's own SyncBatchNorm, fed with our statistics.

Each of the four steps reads its tensors once. One copy brings vectors to the host or to the device, through pinned
memory, and only the copy to the host is waited for.
"""

import numpy as np
import torch
from torch import Tensor

from statsd_bn.reduction import FloatArray

# The operators' mean is a float32, off by up to 2^-24 of itself. Up to this ratio of mean and deviation that is less
# than 10^-6 of a deviation; beyond it the sums are taken around the mean, which finds what the rounding left.
NEAR = 16.0


# Which of the sums to take: those for the input's gradient hold those for weight and bias.
_FOR_THE_INPUT = (True, False, False)

_HALVES = frozenset({torch.float16, torch.bfloat16})


def takes(x: Tensor) -> bool:
    """Whether `x`, dense or not, may come here."""
    return x.is_cuda and x.numel() > 0


def moments(x: Tensor) -> tuple[FloatArray, FloatArray] | None:
    """Returns mean and Σ(x - mean)² of a dense `x`, each of shape (C,); None where the mean is too far from 0."""
    mean, variance = to_host(*torch.batch_norm_update_stats(x, None, None, 0.0))
    if (mean * mean > NEAR * NEAR * variance).any():
        return None
    return mean, variance * (x.numel() // x.shape[1])


def normalise(x: Tensor, mean: FloatArray, invstd: FloatArray, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (x - mean) * invstd * weight + bias, in the type and layout of a dense `x`.

    Args:
        x: shape (N, C, *).
        mean: shape (C,), float64.
        invstd: shape (C,), float64.
        weight: shape (C,) or None for 1.
        bias: shape (C,) or None for 0.
    """
    center = _rounded(mean, x)
    on_device, scale, rest = to_device(x, center, invstd, (center - mean) * invstd)
    weight = weight_of(x, weight)
    addend = rest * weight
    if bias is not None:
        addend = (addend + bias.detach()).to(_compute_type(x))  # one of a wider type would make the sum so wide
    return torch.batch_norm_elemt(x, weight, addend, on_device, scale, 0.0)


def backward_sums(grad: Tensor, x: Tensor, mean: FloatArray, invstd: FloatArray) -> FloatArray:
    """Returns Σdy and Σdy·(x - mean), shape (2, C); `grad`, dy, is of the type and layout of `x`."""
    center = _rounded(mean, x)
    on_device, scale = to_device(x, center, invstd)
    first, second = to_host(*reduced(grad, x, on_device, scale))
    return np.stack((first, second - (mean - center) * first))


def reduced(grad: Tensor, x: Tensor, center: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Σdy and Σdy·(x - center), each of shape (C,), in the compute type.

    Torch's kernel for contiguous inputs in half precision rounds partial sums to half precision, that for channels_last
    does not. So the former are copied to float32.
    """
    if x.dtype in _HALVES and not _is_channels_last(x):
        grad, x = grad.float(), x.float()
    first, second, *_ = torch.batch_norm_backward_reduce(grad, x, center, invstd, weight_of(x, None), *_FOR_THE_INPUT)
    return first, second


def _is_channels_last(x: Tensor) -> bool:
    """Whether torch takes its kernels for channels_last for a dense `x`."""
    return x.stride(1) == 1 or x.numel() == x.shape[0] * x.shape[1]


def input_gradient(
    grad: Tensor, x: Tensor, mean: FloatArray, invstd: FloatArray, means: FloatArray, weight: Tensor | None
) -> Tensor:
    """Returns invstd * weight * (dy - means[0] - (x - mean) * invstd² * means[1]), in the type and layout of `x`.

    Args:
        grad: dy, of the type and layout of `x`.
        x: shape (N, C, *).
        mean: shape (C,), float64.
        invstd: shape (C,), float64.
        means: shape (2, C): the means of dy and of dy·(x - mean) over all replicas.
        weight: shape (C,) or None for 1.
    """
    center = _rounded(mean, x)
    by_deviation = invstd * invstd * means[1]
    on_device, scale, first, second = to_device(x, center, invstd, means[0] - (mean - center) * by_deviation, means[1])
    # The operator would divide sums by a count of 32 bits.
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(grad, x, on_device, scale, weight_of(x, weight), first, second, one)


def to_host(*vectors: Tensor) -> FloatArray:
    """One copy, and the only wait for the device."""
    stacked = torch.stack(vectors)
    if not stacked.is_cuda:
        return stacked.double().numpy()
    host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    torch.cuda.current_stream(stacked.device).synchronize()
    return host.double().numpy()


def to_device(x: Tensor, *vectors: FloatArray) -> tuple[Tensor, ...]:
    """One copy, which nobody waits for; in the type that the operators compute in."""
    stacked = torch.from_numpy(np.stack(vectors)).to(_compute_type(x))
    pinned = stacked.pin_memory() if x.is_cuda else stacked
    return pinned.to(x.device, non_blocking=True).unbind()


def _rounded(mean: FloatArray, x: Tensor) -> FloatArray:
    return torch.from_numpy(mean).to(_compute_type(x)).double().numpy()


def weight_of(x: Tensor, weight: Tensor | None) -> Tensor:
    """Returns a layer's weight, or ones: the operators take the types of their statistics from the weight's."""
    if weight is None:
        return torch.ones(x.shape[1], dtype=_compute_type(x), device=x.device)
    return weight.detach().to(_compute_type(x))


def _compute_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
