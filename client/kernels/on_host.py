"""The steps of a layer whose vectors are on the host, from where they are sent; `on_device` has them on its device.

Both have the same functions, so what is computed from them is written once.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from client.kernels import dispatch, elementwise, vectors
from client.kernels.statistics import Statistics
from statsd_bn.reduction import FloatArray

moments, normalise = dispatch.moments, dispatch.normalise
for_backward = dispatch.for_backward
backward_sums, input_gradient = dispatch.backward_sums, dispatch.input_gradient
vector = vectors.vector
stack = np.stack
affine, centred, scaled = elementwise.affine, elementwise.centred, elementwise.scaled


def by_weight(sums: FloatArray, statistics: Statistics) -> FloatArray:
    """Returns the weight's gradient, shape (C,), of what `backward_sums` has returned."""
    found: FloatArray = sums[1] * statistics.invstd
    return found


def parameter(values: Tensor | None, default: float, statistics: Statistics) -> FloatArray:
    """Returns a parameter-like vector, shape (C,), as float64; full of `default` where a layer lacks it."""
    if values is None:
        return np.full_like(statistics.mean, default)
    return vectors.on_host(values)


def zeros(number: int, x: Tensor) -> FloatArray:
    """Returns so many vectors of zeros, shape (number, C)."""
    return np.zeros((number, x.shape[1]))


def rows(*values: Tensor) -> FloatArray:
    """Returns vectors of shape (C,) as float64, one below the other."""
    return vectors.to_host(*values)


def near(x: Tensor, statistics: Statistics, *values: FloatArray) -> tuple[Statistics, Sequence[FloatArray]]:  # noqa: ARG001 - the other's
    """Returns statistics and vectors where they are combined with `x`: as they are."""
    return statistics, values
