"""The steps of a layer's call for one slice, and the choice of the backend that computes them.

Large tensors stay in the compute type (float32, or float64 for float64 input). Vectors are float64 tensors where
`client.ops.vectors.home` says; they may come from another device of the process, and are copied between the two.
Nothing here waits for a device.
"""

from typing import Protocol

import torch
from torch import Tensor

from client.ops import native
from client.ops.fused import Fused
from client.ops.reference import Reference
from client.ops.statistics import ChannelMoments, ChannelStatistics
from client.ops.vectors import home, narrow


class Backend(Protocol):
    """Computes the steps of a layer for slices of one kind; the functions of this module say what each returns.

    All backends return the same up to rounding.

    Example usage:

        backend = backend_for(x, mask)
        moments = backend.moments(x)
        output = backend.normalise(x, statistics, weight, bias)
        grad, x = backend.for_backward(grad, x)
        sums = backend.backward_sums(grad, x, statistics)
        gradient = backend.input_gradient(grad, x, statistics, means, weight)
    """

    def takes(self, x: Tensor) -> bool:
        """Whether it computes with `x`, which is not empty and need not be dense."""

    def moments(self, x: Tensor) -> ChannelMoments:
        """Returns the moments of a slice."""

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output, in the type of `x`."""

    def for_backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both as the next two steps read them, which copy only what does not lie so."""

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Returns Σdy and Σdy·(x - mean), shape (2, C)."""

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Returns dx, in the type of `x`; `means`: Σdy / n and slope * Σdy·(x - mean) / n, shape (2, C)."""


# The first that takes a slice without a mask computes it; what none takes, the reference does.
BACKENDS: tuple[Backend, ...] = (Fused(),) if native.core is None else (native.Native(), Fused())


def backend_for(x: Tensor, mask: Tensor | None = None) -> Backend:
    """Returns the backend for a slice; arguments as for `moments`."""
    if mask is None and x.numel():
        for backend in BACKENDS:
            if backend.takes(x):
                return backend
    return Reference(mask)


def moments(x: Tensor, mask: Tensor | None = None) -> ChannelMoments:
    """Returns the moments of a slice.

    Args:
        x: shape (N, C, *), any floating-point type, any device. It may be empty.
        mask: shape (N, *), bool: which positions count; None for all.
    """
    if x.numel():
        return backend_for(x, mask).moments(x)
    nothing = zeros(2, x)
    return ChannelMoments(0, nothing[0], nothing[1], tuple(x.shape))


def normalise(x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (x - mean) * invstd * weight + bias, in the type of `x`.

    Args:
        x: shape (N, C, *).
        statistics: of the round.
        weight: shape (C,) or None for 1.
        bias: shape (C,) or None for 0.

    Raises:
        ValueError: weight or bias have another shape.
    """
    check_parameter("weight", weight, x)
    check_parameter("bias", bias, x)
    return backend_for(x).normalise(x, statistics.on(home(x)), weight, bias)


def check_parameter(name: str, values: Tensor | None, x: Tensor) -> None:
    """Raises ValueError where weight or bias have another shape than (C,)."""
    if values is not None and values.shape != x.shape[1:2]:
        raise ValueError(f"expected a {name} of shape ({x.shape[1]},), got {tuple(values.shape)}")


def for_backward(grad: Tensor, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns gradient and input as `backward_sums` and `input_gradient` read them.

    Each of the two would copy what lies otherwise; this copies it once for both.
    """
    return backend_for(x, mask).for_backward(grad, x)


def backward_sums(grad: Tensor, x: Tensor, statistics: ChannelStatistics, mask: Tensor | None = None) -> Tensor:
    """Returns Σdy and Σdy·(x - mean) of a slice: shape (2, C), float64.

    Masked positions are normalised with the statistics too, so their gradients count here; but where such a gradient
    is 0, as a loss that leaves them out makes it, a NaN or infinity that pads the input does no harm.

    Args:
        grad: the gradient dy of the output, shape (N, C, *).
        x: the input, same shape.
        statistics: of the forward round.
        mask: as for `moments`.
    """
    if x.numel() == 0:
        return zeros(2, x)
    return backend_for(x, mask).backward_sums(grad, x, statistics.on(home(x)))


def input_gradient(
    grad: Tensor,
    x: Tensor,
    statistics: ChannelStatistics,
    sums: Tensor,
    weight: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns dx, in the type of `x`.

    dx = invstd * weight * (dy - m·Σdy/n - m·(x - mean) * invstd² * Σdy·(x - mean)/n), with the sums over all replicas
    and m = 1 where a position counts, else 0.

    Args:
        grad: dy, shape (N, C, *).
        x: the input, same shape.
        statistics: of the forward round.
        sums: shape (2, C): the aggregate of `backward_sums`.
        weight: shape (C,) or None for 1.
        mask: as for `moments`.

    Raises:
        ValueError: the weight has another shape.
    """
    check_parameter("weight", weight, x)
    statistics = statistics.on(home(x))
    means = means_of(sums.to(home(x), non_blocking=True), statistics)
    return backend_for(x, mask).input_gradient(grad, x, statistics, means, weight)


def means_of(sums: Tensor, statistics: ChannelStatistics) -> Tensor:
    """Returns what `Backend.input_gradient` takes of the sums over all replicas, shape (2, C)."""
    first, second = sums / statistics.count
    return torch.stack((first, second * statistics.slope))


def parameter_gradients(sums: Tensor, statistics: ChannelStatistics) -> tuple[Tensor, Tensor]:
    """Returns the gradients of weight and bias, each of shape (C,), float64, of what `backward_sums` has returned."""
    return sums[1] * statistics.on(sums.device).invstd, sums[0]


def vector(values: Tensor, x: Tensor) -> Tensor:
    """Returns `values`, shape (C,), float64, in the compute type of `x` on its device, in memory of their own."""
    (found,) = narrow(x, values.to(home(x), non_blocking=True))
    return found.clone() if found.dtype == values.dtype else found


def zeros(number: int, x: Tensor) -> Tensor:
    """Returns so many vectors of zeros, shape (number, C), float64."""
    return torch.zeros(number, x.shape[1], dtype=torch.float64, device=home(x))
