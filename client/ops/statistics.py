"""Moments and statistics of a batch as float64 tensors, see `client.ops.vectors.home`.

Nothing here asks a tensor for its value, which would wait for its device. All operations are those of
`statsd_bn.moments` in the same order, and rounded as IEEE 754 says, so all ranks get the same bits on every device. A
round that has failed on devices has NaN for its count: what is made of it is NaN, and moves no running statistics.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from client.transports.device_rows import Count, to_host
from statsd_bn.moments import Moments


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
        """The count, where the host knows it; else 0."""
        return self.count if isinstance(self.count, int) else 0

    @property
    def vectors(self) -> Tensor:
        """The form that travels: shape (2, C), sums above squares."""
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
        """Returns the same as arrays, which waits for the device."""
        return Moments(int(self.count), to_host(self.sums), to_host(self.squares))

    def on(self, device: torch.device) -> "ChannelMoments":
        """Returns the same on another device."""
        if self.sums.device == device:
            return self
        count, (sums, squares) = _moved(device, self.count, self.sums, self.squares)
        return ChannelMoments(count, sums, squares, self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class ChannelStatistics:
    """What one round says of each channel.

    Attributes:
        count: values per channel over all replicas, at least 1.
        mean: shape (C,): Σx / n.
        invstd: shape (C,): what the centred input is multiplied with.
        slope: shape (C,): 1 where `invstd` follows the variance, 0 where eps_mode "clamp" holds it.
    """

    count: Count
    mean: Tensor
    invstd: Tensor
    slope: Tensor

    @classmethod
    def of(cls, moments: ChannelMoments, eps: float, eps_mode: str) -> "ChannelStatistics":
        """Returns the statistics of a batch.

        Args:
            moments: of the whole batch; without values they give zeros, with which there is nothing to normalise.
            eps: keeps `invstd` finite.
            eps_mode: "plus" for (var + eps)^-1/2, "clamp" for max(var, eps)^-1/2.
        """
        some = ChannelMoments(at_least_one(moments.count), moments.sums, moments.squares)
        variance = some.variance()
        if eps_mode == "clamp":
            slope, held = (variance >= eps).double(), variance.clamp(min=eps)
        else:
            slope, held = torch.ones_like(variance), variance + eps
        return cls(some.count, some.mean(), _zero_where_empty(moments.count, _inverse_root(held)), slope)

    def on(self, device: torch.device) -> "ChannelStatistics":
        """Returns the same on another device."""
        if self.mean.device == device:
            return self
        count, (mean, invstd, slope) = _moved(device, self.count, self.mean, self.invstd, self.slope)
        return ChannelStatistics(count, mean, invstd, slope)


def at_least_one(count: Count) -> Count:
    """Returns a count to divide by, so that sums of nothing stay 0."""
    return max(count, 1) if isinstance(count, int) else count.clamp(min=1)


def _divisor(count: Count, device: torch.device) -> Count:
    """Returns a count to divide vectors on a device by: as a number CUDA would multiply with its reciprocal."""
    if isinstance(count, Tensor) or device.type == "cpu":
        return count
    return torch.full((), count, dtype=torch.float64, device=device)


def _zero_where_empty(count: Count, values: Tensor) -> Tensor:
    if isinstance(count, int):
        return values if count else torch.zeros_like(values)
    return torch.where(count == 0, torch.zeros_like(values), values)


def _inverse_root(values: Tensor) -> Tensor:
    """Returns 1 / √values, with root and quotient each rounded to nearest.

    On a CPU torch's `sqrt` is MKL's, of which one in 100 has another last bit, and its `rsqrt` rounds so; on CUDA it is
    the other way round.
    """
    return values.rsqrt() if values.is_cpu else values.sqrt().reciprocal()


def _moved(device: torch.device, count: Count, *vectors: Tensor) -> tuple[Count, list[Tensor]]:
    """Returns count and vectors on a device: between two of a kind by a copy that the host does not wait for.

    Torch has the streams of both devices wait for each other, so the copy is ordered.
    """
    there = count if isinstance(count, int) else count.to(device, non_blocking=True)
    return there, [vector.to(device, non_blocking=True) for vector in vectors]


class Running(NamedTuple):
    """The buffers that move in a forward pass; each may be None, the first two only together.

    A `momentum` of NaN stands for the cumulative average, by the number of batches tracked.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    tracked: Tensor | None = None
    momentum: float = 0.0
