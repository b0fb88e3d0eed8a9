"""The four steps that a replica does with its own slice, on its own device: what layers call.

`backends` chooses who computes them. The large tensors stay on their device in the compute type (float32, or float64
for float64 input); only vectors of length C come to the host, where they are float64.
"""

from torch import Tensor

from client.kernels.backends import backend_for
from client.kernels.statistics import Statistics
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray, quietly


def count(x: Tensor, mask: Tensor | None) -> int:
    """Returns how many values per channel count for the statistics, exactly; arguments as for `moments`."""
    return x.numel() // x.shape[1] if mask is None else int(mask.sum())


@quietly
def moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Returns the moments of a slice.

    Args:
        x: shape (N, C, *), any floating-point type, any device. It may be empty.
        mask: shape (N, *), bool: which positions count; None for all.
    """
    number = count(x, mask)
    return backend_for(x, mask).moments(x, number) if number else Moments.empty(x.shape[1])


@quietly
def normalise(x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (x - mean) * invstd * weight + bias, in the type of `x`.

    Args:
        x: shape (N, C, *).
        statistics: of the round.
        weight: shape (C,) or None for 1.
        bias: shape (C,) or None for 0.
    """
    return backend_for(x).normalise(x, statistics, weight, bias)


def for_backward(grad: Tensor, x: Tensor, statistics: Statistics, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns gradient and input as `backward_sums` and `input_gradient` read them.

    Each of the two would copy what lies otherwise; this copies it once for both.
    """
    return backend_for(x, mask).for_backward(grad, x, statistics)


@quietly
def backward_sums(grad: Tensor, x: Tensor, statistics: Statistics, mask: Tensor | None = None) -> FloatArray:
    """Returns Σdy and Σdy·(x - mean) of a slice: shape (2, C), float64.

    Masked positions are normalised with the statistics too, so their gradients count here; but where such a gradient
    is 0, as a loss that leaves them out makes it, a NaN or infinity that pads the input does no harm.

    Args:
        grad: the gradient dy of the output, shape (N, C, *).
        x: the input, same shape.
        statistics: of the forward round.
        mask: as for `moments`.
    """
    return backend_for(x, mask).backward_sums(grad, x, statistics)


@quietly
def input_gradient(
    grad: Tensor,
    x: Tensor,
    statistics: Statistics,
    sums: FloatArray,
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
    """
    means = sums / statistics.count
    means[1] *= statistics.slope
    return backend_for(x, mask).input_gradient(grad, x, statistics, means, weight)
