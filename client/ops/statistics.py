"""Moments and statistics of a batch, one float64 value per channel, and the layout of the tensors they describe.

The float64 vectors are on the device of the input; where a device has no float64, as MPS, they are on the host, and
move to the device in the compute type (float32, or float64 for float64 input).

No function here reads the value of a tensor, which would wait for its device. The operations are as in
`statsd_bn.reduction`, in the same order and rounded as IEEE 754 says, so all ranks get the same bits on every device. A
round that has failed on devices has a count of NaN, which makes all results NaN and updates no running statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from client.transports.device_rows import Count, to_host
from statsd_bn.reduction import Moments

HOST = torch.device("cpu")

# Memory formats that are channels_last, by the number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_DEVICES_WITH_FLOAT64 = frozenset({"cpu", "cuda"})


@dataclass(frozen=True, eq=False, slots=True)
class ChannelMoments:
    """Count, sums and sums of squares per channel, see `statsd_bn.Moments`.

    Attributes:
        count: values per channel; NaN where the round has failed.
        sums: shape (C,): Σx.
        squares: shape (C,): Σx².
        shape: of the input, (N, C, *); () for several inputs.
    """

    count: Count
    sums: Tensor
    squares: Tensor
    shape: tuple[int, ...] = ()

    @classmethod
    def from_centred(cls, count: Count, mean: Tensor, centred: Tensor, shape: tuple[int, ...]) -> "ChannelMoments":
        """Returns the moments of `count` values with this mean and Σ(x - mean)², each of shape (C,)."""
        return cls(count, count * mean, centred + count * mean * mean, shape)

    @property
    def known(self) -> int:
        """The count where the host knows it, else 0."""
        return self.count if isinstance(self.count, int) else 0

    @property
    def vectors(self) -> Tensor:
        """The row that travels: shape (2, C), sums above squares."""
        return torch.stack((self.sums, self.squares))

    def merge(self, other: "ChannelMoments") -> "ChannelMoments":
        """Returns the moments of both batches together."""
        return ChannelMoments(self.count + other.count, self.sums + other.sums, self.squares + other.squares)

    def mean(self) -> Tensor:
        """Returns Σx / n, shape (C,); NaN without values."""
        return self.sums / _divisor(self.count, self.sums.device)

    def variance(self, *, unbiased: bool = False) -> Tensor:
        """Returns the variance per channel, never below 0; see `statsd_bn.Moments.variance`."""
        count = _divisor(self.count, self.sums.device)
        centred = (self.squares - self.sums * self.sums / count).clamp(min=0)
        return centred / (count - int(unbiased))

    def on_host(self) -> Moments:
        """Returns the moments as arrays, which waits for the device."""
        return Moments(int(self.count), to_host(self.sums), to_host(self.squares))

    def on(self, device: torch.device) -> "ChannelMoments":
        """Returns the moments on a device."""
        if self.sums.device == device:
            return self
        count, sums, squares = _moved(device, self.count, self.sums, self.squares)
        return ChannelMoments(count, sums, squares, self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class ChannelStatistics:
    """The result of a round for each channel; vectors of shape (C,).

    Attributes:
        count: values per channel over all replicas, at least 1.
        mean: Σx / n.
        invstd: the factor of the centred input.
        slope: 1 where `invstd` depends on the variance, 0 where eps_mode "clamp" makes it constant.
    """

    count: Count
    mean: Tensor
    invstd: Tensor
    slope: Tensor

    @classmethod
    def of(cls, moments: ChannelMoments, eps: float, eps_mode: str) -> "ChannelStatistics":
        """Returns the statistics of a batch, zeros for an empty one.

        `invstd` is (var + eps)^-1/2 in `eps_mode` "plus", max(var, eps)^-1/2 in "clamp".
        """
        count = at_least_one(moments.count)
        moments_of_some = ChannelMoments(count, moments.sums, moments.squares)
        variance = moments_of_some.variance()
        if eps_mode == "clamp":
            slope, bounded = (variance >= eps).double(), variance.clamp(min=eps)
        else:
            slope, bounded = torch.ones_like(variance), variance + eps
        invstd = _zero_where_empty(moments.count, _inverse_root(bounded))
        return cls(count, moments_of_some.mean(), invstd, slope)

    def on(self, device: torch.device) -> "ChannelStatistics":
        """Returns the statistics on a device."""
        if self.mean.device == device:
            return self
        return ChannelStatistics(*_moved(device, self.count, self.mean, self.invstd, self.slope))


def at_least_one(count: Count) -> Count:
    """Returns a divisor for sums over `count` values, so that the mean of no values is 0."""
    return max(count, 1) if isinstance(count, int) else count.clamp(min=1)


def _divisor(count: Count, device: torch.device) -> Count:
    """Returns a count by which vectors on a device can be divided: CUDA multiplies by the reciprocal of a number."""
    if isinstance(count, Tensor) or device.type == "cpu":
        return count
    return torch.full((), count, dtype=torch.float64, device=device)


def _zero_where_empty(count: Count, values: Tensor) -> Tensor:
    if isinstance(count, int):
        return values if count else torch.zeros_like(values)
    return torch.where(count == 0, torch.zeros_like(values), values)


def _inverse_root(values: Tensor) -> Tensor:
    """Returns 1 / √values, with root and quotient each rounded to nearest.

    On a CPU torch's `sqrt` is MKL's, which has a wrong last bit in 1 of 100 values, while `rsqrt` rounds both steps to
    nearest; on CUDA it is the other way round.
    """
    return values.rsqrt() if values.is_cpu else values.sqrt().reciprocal()


def _moved(device: torch.device, count: Count, *vectors: Tensor) -> tuple[Any, ...]:
    """Returns count and vectors on a device, copied asynchronously.

    Between two devices of a kind torch has the streams wait for each other, so the copy is ordered.
    """
    there = count if isinstance(count, int) else count.to(device, non_blocking=True)
    return there, *[vector.to(device, non_blocking=True) for vector in vectors]


class Running(NamedTuple):
    """The buffers that a forward pass updates; each may be None, the first two only together.

    A `momentum` of NaN means the cumulative average, over the number of batches tracked.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    tracked: Tensor | None = None
    momentum: float = 0.0


def vector_device(x: Tensor) -> torch.device:
    """Returns the device of the float64 vectors of `x`."""
    device = x.device
    return device if device.type in _DEVICES_WITH_FLOAT64 else HOST


def compute_type(x: Tensor) -> torch.dtype:
    """Returns float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def along_channels(values: Tensor, x: Tensor) -> Tensor:
    """Returns a view of `values`, shape (C,), that broadcasts along the channels of `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def to_compute_type(x: Tensor, *vectors: Tensor) -> Sequence[Tensor]:
    """Returns float64 vectors in the compute type of `x` on its device, in one copy."""
    dtype = compute_type(x)
    if vectors[0].device == x.device:
        return [vector.to(dtype) for vector in vectors]
    return torch.stack(vectors).to(dtype).to(x.device, non_blocking=True).unbind()


def to_float64(x: Tensor, *vectors: Tensor) -> Sequence[Tensor]:
    """Returns vectors on the device of `x` as float64 vectors, in one copy."""
    device = vector_device(x)
    if device == x.device:
        return [vector.double() for vector in vectors]
    return torch.stack(vectors).to(device).double().unbind()


def in_output_layout(x: Tensor) -> Tensor:
    """Returns `x` in the layout of torch's batch norm outputs, which users may `view`: channels_last, or contiguous."""
    layout = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    return x if x.is_contiguous(memory_format=layout) else x.contiguous()


def is_dense(x: Tensor) -> bool:
    """Whether `x` is contiguous or channels_last."""
    return x.is_contiguous() or x.is_contiguous(memory_format=CHANNELS_LAST.get(x.dim(), torch.contiguous_format))


def dense(x: Tensor) -> Tensor:
    """Returns `x` in the layout of its output; a copy only where the layout differs."""
    if is_dense(x):
        return x
    copy = torch.empty_like(x)  # channels_last with gaps stays channels_last
    if not is_dense(copy):
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    return copy.copy_(x)


def same_layout(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both dense, in the type and layout of `x`."""
    x = dense(x)
    if grad.stride() != x.stride():
        return torch.empty_like(x).copy_(grad), x  # one copy, also where the type differs
    return (grad if grad.dtype == x.dtype else grad.to(x.dtype)), x
