"""The steps of a layer whose vectors stay on the device of its slice: what `on_host` is for vectors on the host.

Nothing here waits for the device or copies to the host. Vectors are float64 tensors, and may come from another device
of the process: they are copied between the two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from client.kernels import device_elementwise, fused
from client.kernels.device_elementwise import DeviceElementwise
from client.kernels.device_statistics import DeviceMoments, DeviceStatistics, moved
from client.kernels.fused import Fused
from client.kernels.vectors import compute_type

_FUSED = Fused()


def _backend(x: Tensor, mask: Tensor | None = None) -> Fused | DeviceElementwise:
    return _FUSED if fused.takes(x, mask) and x.numel() else DeviceElementwise(mask)


def count(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns how many values per channel count for the statistics: shape (), float64."""
    if mask is None:
        return torch.full((), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    return mask.sum(dtype=torch.float64)


def moments(x: Tensor, mask: Tensor | None = None) -> DeviceMoments:
    """Returns the moments of a slice; see `dispatch` for this and the next four."""
    return _backend(x, mask).moments(x) if x.numel() else DeviceMoments.empty(x)


def normalise(x: Tensor, statistics: DeviceStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (x - mean) * invstd * weight + bias, in the type of `x`."""
    return _backend(x).normalise(x, statistics.on(x.device), weight, bias)


def for_backward(
    grad: Tensor,
    x: Tensor,
    statistics: DeviceStatistics,  # noqa: ARG001 - `dispatch` asks them
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns gradient and input as the next two steps read them."""
    return _backend(x, mask).for_backward(grad, x)


def backward_sums(grad: Tensor, x: Tensor, statistics: DeviceStatistics, mask: Tensor | None = None) -> Tensor:
    """Returns Σdy and Σdy·(x - mean) of a slice: shape (2, C)."""
    if x.numel() == 0:
        return zeros(2, x)
    return _backend(x, mask).backward_sums(grad, x, statistics.on(x.device))


def input_gradient(
    grad: Tensor,
    x: Tensor,
    statistics: DeviceStatistics,
    sums: Tensor,
    weight: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns dx, in the type of `x`."""
    statistics = statistics.on(x.device)
    first, second = sums.to(x.device, non_blocking=True) / statistics.count
    means = torch.stack((first, second * statistics.slope))
    return _backend(x, mask).input_gradient(grad, x, statistics, means, weight)


def vector(values: Tensor, x: Tensor) -> Tensor:
    """Returns `values`, shape (C,), on the device of `x` and in its compute type, in memory of their own."""
    return values.to(x.device, compute_type(x), non_blocking=True, copy=True)


def by_weight(sums: Tensor, statistics: DeviceStatistics) -> Tensor:
    """Returns the weight's gradient, shape (C,), of what `backward_sums` has returned."""
    return sums[1] * statistics.on(sums.device).invstd


def parameter(values: Tensor | None, default: float, statistics: DeviceStatistics) -> Tensor:
    """Returns a parameter-like vector, shape (C,), as float64; full of `default` where a layer lacks it."""
    if values is None:
        return torch.full_like(statistics.mean, default)
    return values.detach().double()


def zeros(number: int, x: Tensor) -> Tensor:
    """Returns so many vectors of zeros, shape (number, C)."""
    return torch.zeros(number, x.shape[1], dtype=torch.float64, device=x.device)


def rows(*values: Tensor) -> Tensor:
    """Returns vectors of shape (C,) as float64, one below the other."""
    return torch.stack([each.double() for each in values])


def near(x: Tensor, statistics: DeviceStatistics, *vectors: Tensor) -> tuple[DeviceStatistics, Sequence[Tensor]]:
    """Returns statistics and vectors on the device of `x`."""
    return statistics.on(x.device), moved(x.device, *vectors)


stack = torch.stack
affine, centred, scaled = device_elementwise.affine, device_elementwise.centred, device_elementwise.scaled
