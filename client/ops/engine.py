"""The steps of a layer's call for one slice, and the choice of the backend that computes them.

Vectors may come from another device of the process; they are copied asynchronously.
"""

import torch
from torch import Tensor

from client.ops import native
from client.ops.fused import Fused
from client.ops.reference import Reference
from client.ops.statistics import ChannelMoments, ChannelStatistics, same_layout, to_compute_type, vector_device

# The first backend that supports a slice without a mask computes it; otherwise the reference does. The methods of all
# backends are the steps below, and return the same results up to rounding.
BACKENDS: tuple[native.Native | Fused, ...] = (Fused(),) if native.core is None else (native.Native(), Fused())


def backend_for(x: Tensor, mask: Tensor | None = None) -> native.Native | Fused | Reference:
    """Backend for a slice; arguments as for `moments`."""
    if mask is None and x.numel():
        for backend in BACKENDS:
            if backend.supports(x):
                return backend
    return Reference(mask)


def moments(x: Tensor, mask: Tensor | None = None) -> ChannelMoments:
    """Moments of a slice, shape (N, C, *), which may be empty; `mask`, shape (N, *), bool: which positions count."""
    if x.numel():
        return backend_for(x, mask).moments(x)
    return ChannelMoments(0, zeros(2, x), tuple(x.shape))


def normalise(x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x - mean) * invstd * weight + bias, in the type of `x`; None means weight 1 or bias 0."""
    check_parameter("weight", weight, x)
    check_parameter("bias", bias, x)
    return backend_for(x).normalise(x, statistics.on(vector_device(x)), weight, bias)


def check_parameter(name: str, values: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless a weight or bias has the shape (C,)."""
    if values is not None and values.shape != x.shape[1:2]:
        raise ValueError(f"expected a {name} of shape ({x.shape[1]},), got {tuple(values.shape)}")


def prepare_backward(grad: Tensor, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradient and input in one layout; otherwise `backward_sums` and `input_gradient` would each copy them."""
    return (grad, x) if isinstance(backend_for(x, mask), Reference) else same_layout(grad, x)


def backward_sums(grad: Tensor, x: Tensor, statistics: ChannelStatistics, mask: Tensor | None = None) -> Tensor:
    """Σdy and Σdy·(x - mean) of a slice: shape (2, C), float64.

    The output of masked positions is normalised too, so their gradients count. Where such a gradient is 0, because the
    loss leaves the position out, NaN or infinity in the input has no effect.
    """
    if x.numel() == 0:
        return zeros(2, x)
    return backend_for(x, mask).backward_sums(grad, x, statistics.on(vector_device(x)))


def input_gradient(
    grad: Tensor,
    x: Tensor,
    statistics: ChannelStatistics,
    sums: Tensor,
    weight: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """dx, in the type of `x`; `sums` is the aggregate of `backward_sums` over all replicas.

    dx = invstd * weight * (dy - m·Σdy/n - m·(x - mean) * invstd² * Σdy·(x - mean)/n), m = 1 where a position counts,
    else 0.
    """
    check_parameter("weight", weight, x)
    statistics = statistics.on(vector_device(x))
    means = means_of(sums.to(vector_device(x), non_blocking=True), statistics)
    return backend_for(x, mask).input_gradient(grad, x, statistics, means, weight)


def means_of(sums: Tensor, statistics: ChannelStatistics) -> Tensor:
    """Σdy / n and slope * Σdy·(x - mean) / n for the sums over all replicas, shape (2, C)."""
    first, second = sums / statistics.count
    return torch.stack((first, second * statistics.slope))


def parameter_gradients(sums: Tensor, statistics: ChannelStatistics) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias for the result of `backward_sums`, shape (C,), float64."""
    return sums[1] * statistics.on(sums.device).invstd, sums[0]


def to_parameter(values: Tensor, x: Tensor) -> Tensor:
    """Copy of a float64 vector in the compute type of `x`, on its device."""
    (converted,) = to_compute_type(x, values.to(vector_device(x), non_blocking=True))
    return converted.clone() if converted.dtype == values.dtype else converted


def zeros(number: int, x: Tensor) -> Tensor:
    """`number` vectors of zeros, shape (number, C), float64."""
    return torch.zeros(number, x.shape[1], dtype=torch.float64, device=vector_device(x))
