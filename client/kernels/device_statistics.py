"""What `Moments` and `Statistics` are on the host, as tensors that stay on a device.

Nothing here asks a tensor for its value, which would wait for the device. All numbers are float64, and all operations
are those of the host in the same order, so both give the same bits; but torch's square roots on a CPU, where tests run
this, are MKL's, of which one in 100 has another last bit. A round that has failed has NaN for its count: whatever is
made of it is NaN, and moves no running statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from statsd_bn.moments import Moments


@dataclass(frozen=True, eq=False, slots=True)
class DeviceMoments:
    """Count, sums and sums of squares per channel, see `Moments`.

    Attributes:
        count: shape (): values per channel, an exact integer; NaN where the round has failed.
        sums: shape (C,): Σx.
        squares: shape (C,): Σx².
        known: the count, where the shape of the input says it; None where a mask counts, or for several inputs.
        shape: of the input, (N, C, *); () for several inputs.
    """

    count: Tensor
    sums: Tensor
    squares: Tensor
    known: int | None = None
    shape: tuple[int, ...] = ()

    @classmethod
    def empty(cls, x: Tensor) -> "DeviceMoments":
        """Returns the moments of an empty input, on its device."""
        count, sums, squares = torch.zeros(3, x.shape[1], dtype=torch.float64, device=x.device)
        return cls(count.sum(), sums, squares, 0, tuple(x.shape))

    @classmethod
    def from_centred(cls, count: int | Tensor, mean: Tensor, centred: Tensor, x: Tensor) -> "DeviceMoments":
        """Returns the moments of `count` values of `x` with this mean and Σ(x - mean)², each of shape (C,)."""
        sums, squares = count * mean, centred + count * mean * mean
        shape = tuple(x.shape)
        if isinstance(count, Tensor):
            return cls(count, sums, squares, None, shape)
        return cls(torch.full((), count, dtype=torch.float64, device=mean.device), sums, squares, count, shape)

    @property
    def vectors(self) -> Tensor:
        """The form that travels: shape (2, C), sums above squares."""
        return torch.stack((self.sums, self.squares))

    @property
    def has_values(self) -> Tensor:
        """Whether there is any value; False where the round has failed. Shape (), bool."""
        return self.count > 0

    def merge(self, other: "DeviceMoments") -> "DeviceMoments":
        """Returns the moments of both batches together."""
        return DeviceMoments(self.count + other.count, self.sums + other.sums, self.squares + other.squares)

    def mean(self) -> Tensor:
        """Returns Σx / n, shape (C,); NaN without values."""
        return self.sums / self.count

    def variance(self, *, unbiased: bool = False) -> Tensor:
        """Returns the variance per channel, never below 0; see `Moments.variance`."""
        centred = (self.squares - self.sums * self.sums / self.count).clamp(min=0)
        return centred / (self.count - int(unbiased))

    def on_host(self) -> Moments:
        """Returns the same on the host, which waits for the device."""
        count, sums, squares = (each.cpu().numpy() for each in (self.count, self.sums, self.squares))
        return Moments(int(count), sums, squares)

    def on(self, device: torch.device) -> "DeviceMoments":
        """Returns the same on another device."""
        if self.count.device == device:
            return self
        count, sums, squares = moved(device, self.count, self.sums, self.squares)
        return DeviceMoments(count, sums, squares, self.known, self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class DeviceStatistics:
    """What one round says of each channel, see `Statistics`; the count has shape (), all else shape (C,)."""

    count: Tensor
    mean: Tensor
    invstd: Tensor
    slope: Tensor

    @classmethod
    def of(cls, moments: DeviceMoments, eps: float, eps_mode: str) -> "DeviceStatistics":
        """Returns the statistics of a batch; arguments as for `Statistics.of`."""
        at_least_one = moments.count.clamp(min=1)
        some = DeviceMoments(at_least_one, moments.sums, moments.squares)
        variance = some.variance()
        if eps_mode == "clamp":
            slope, held = (variance >= eps).double(), variance.clamp(min=eps)
        else:
            slope, held = torch.ones_like(variance), variance + eps
        invstd = inverse_root(held)
        return cls(at_least_one, some.mean(), torch.where(moments.count == 0, torch.zeros_like(invstd), invstd), slope)

    def on(self, device: torch.device) -> "DeviceStatistics":
        """Returns the same on another device."""
        if self.mean.device == device:
            return self
        return DeviceStatistics(*moved(device, self.count, self.mean, self.invstd, self.slope))


def inverse_root(values: Tensor) -> Tensor:
    """Returns 1 / √values. CUDA rounds both steps as the host does; its own `rsqrt` does not."""
    return values.sqrt().reciprocal()


def moved(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns tensors on a device: between two of a kind by a copy that the host does not wait for.

    Torch has the streams of both devices wait for each other, so the copy is ordered.
    """
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
