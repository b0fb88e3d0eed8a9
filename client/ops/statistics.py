"""Moments and statistics of a batch, with one float64 value per channel; and the layout of the tensors they describe.

The vectors are on the device of the input, or on the host where the device has no float64, such as MPS. On CUDA only
`on_host` waits. Operations, order and rounding are those of `statsd_bn.reduction`, so all ranks get the same bits.
A round that has failed on devices has a count of NaN, so its results are NaN and update no running statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from client.transports.device_rows import Count, to_host
from statsd_bn.reduction import Moments

HOST = torch.device("cpu")

# Memory formats that are channels_last, by the number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_DEVICES_WITH_FLOAT64 = frozenset({"cpu", "cuda"})


@dataclass(frozen=True, eq=False, slots=True)
class ChannelVectors:
    """Several values per channel, and the count of values that they describe."""

    count: Count
    vectors: Tensor  # shape (number, C), float64

    def beside(self, x: Tensor) -> Self:
        """Vectors and count for computations with `x`, copied asynchronously; torch orders both devices' streams."""
        device = vector_device(x)
        if self.vectors.device == device:
            return self
        count = self.count if isinstance(self.count, int) else self.count.to(device, non_blocking=True)
        return replace(self, count=count, vectors=self.vectors.to(device, non_blocking=True))


@dataclass(frozen=True, eq=False, slots=True)
class ChannelMoments(ChannelVectors):
    """Count, and per channel the sum and the sum of squares, as they travel; see `statsd_bn.Moments`."""

    shape: tuple[int, ...] = ()  # of the input, (N, C, *); () for several inputs

    @classmethod
    def from_centred(cls, count: Count, mean: Tensor, centred: Tensor, shape: tuple[int, ...]) -> "ChannelMoments":
        """Moments of `count` values with this mean and Σ(x - mean)²."""
        return cls(count, torch.stack((count * mean, centred + count * mean * mean)), shape)

    def merge(self, other: "ChannelMoments") -> "ChannelMoments":
        """Moments of both batches together."""
        return ChannelMoments(self.count + other.count, self.vectors + other.vectors)

    def mean(self) -> Tensor:
        """Σx / n; NaN without values."""
        return self.vectors[0] / _divisor(self.count, self.vectors.device)

    def variance(self, *, unbiased: bool = False) -> Tensor:
        """Variance, never below 0."""
        count = _divisor(self.count, self.vectors.device)
        sums, squares = self.vectors
        centred: Tensor = (squares - sums * sums / count).clamp(min=0)
        return centred / (count - int(unbiased))

    def on_host(self) -> Moments:
        """Moments as arrays; waits for the device."""
        return Moments(int(self.count), *to_host(self.vectors))


@dataclass(frozen=True, eq=False, slots=True)
class ChannelStatistics(ChannelVectors):
    """Mean, invstd and its slope (1 where it depends on the variance, else 0) per channel; the count is at least 1."""

    @classmethod
    def of(cls, moments: ChannelMoments, eps: float, eps_mode: str) -> "ChannelStatistics":
        """Statistics of a batch; `invstd` is 0 for an empty one. In eps_mode "clamp" `invstd` is max(var, eps)^-1/2."""
        some = ChannelMoments(at_least_one(moments.count), moments.vectors)
        variance = some.variance()
        if eps_mode == "clamp":
            slope, bounded = (variance >= eps).double(), variance.clamp(min=eps)
        else:
            slope, bounded = torch.ones_like(variance), variance + eps
        # Root and reciprocal must each round to nearest: on a CPU (MKL) only `rsqrt` does that, on CUDA only `sqrt`.
        invstd = bounded.rsqrt() if bounded.is_cpu else bounded.sqrt().reciprocal()
        if isinstance(moments.count, Tensor):
            invstd = torch.where(moments.count == 0, torch.zeros_like(invstd), invstd)
        elif not moments.count:
            invstd = torch.zeros_like(invstd)
        return cls(some.count, torch.stack((some.mean(), invstd, slope)))

    @property
    def mean(self) -> Tensor:
        """Mean."""
        return self.vectors[0]

    @property
    def invstd(self) -> Tensor:
        """Factor of the centred input."""
        return self.vectors[1]

    @property
    def slope(self) -> Tensor:
        """1 where `invstd` depends on the variance, 0 where eps_mode "clamp" makes it constant."""
        return self.vectors[2]


def at_least_one(count: Count) -> Count:
    """Divisor of sums over `count` values, so that the mean of no values is 0."""
    return max(count, 1) if isinstance(count, int) else count.clamp(min=1)


def _divisor(count: Count, device: torch.device) -> Count:
    """The count as a divisor: a tensor unless on a CPU, since CUDA would multiply by the reciprocal of a number."""
    if isinstance(count, Tensor) or device.type == "cpu":
        return count
    return torch.full((), count, dtype=torch.float64, device=device)


class Running(NamedTuple):
    """Buffers that a forward pass updates; each may be None, the first two only together."""

    mean: Tensor | None = None
    var: Tensor | None = None
    tracked: Tensor | None = None
    momentum: float = 0.0  # NaN: the cumulative average over the batches tracked


def vector_device(x: Tensor) -> torch.device:
    """Device of the float64 vectors of `x`."""
    device = x.device
    return device if device.type in _DEVICES_WITH_FLOAT64 else HOST


def compute_type(x: Tensor) -> torch.dtype:
    """Type in which values are normalised: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def along_channels(values: Tensor, x: Tensor) -> Tensor:
    """View of a vector, shape (C,), that broadcasts with `x`, shape (N, C, *)."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def to_compute_type(x: Tensor, *vectors: Tensor) -> Sequence[Tensor]:
    """Float64 vectors in the compute type of `x` on its device, in one copy."""
    dtype = compute_type(x)
    if vectors[0].device == x.device:
        return [vector.to(dtype) for vector in vectors]
    return torch.stack(vectors).to(dtype).to(x.device, non_blocking=True).unbind()


def to_float64(x: Tensor, *vectors: Tensor) -> Sequence[Tensor]:
    """Vectors on the device of `x` as float64 vectors, in one copy."""
    device = vector_device(x)
    if device == x.device:
        return [vector.double() for vector in vectors]
    return torch.stack(vectors).to(device).double().unbind()


def is_dense(x: Tensor) -> bool:
    """Whether `x` is contiguous or channels_last."""
    return x.is_contiguous() or x.is_contiguous(memory_format=CHANNELS_LAST.get(x.dim(), torch.contiguous_format))


def dense(x: Tensor) -> Tensor:
    """`x`, or a copy without gaps if it has gaps. The output gets this layout, so that users can `view` it."""
    if is_dense(x):
        return x
    copy = torch.empty_like(x)  # channels_last with gaps stays channels_last
    if not is_dense(copy):
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    return copy.copy_(x)


def same_layout(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and input, dense, in the type and layout of `x`."""
    x = dense(x)
    if grad.stride() != x.stride():
        return torch.empty_like(x).copy_(grad), x  # one copy, also where the type differs
    return (grad if grad.dtype == x.dtype else grad.to(x.dtype)), x
