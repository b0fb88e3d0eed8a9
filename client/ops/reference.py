"""The backends of torch's operators: `Reference`, for all slices, `Traced`, for compilers, and `Fused`, for CUDA.

A slice is centred before it is squared or scaled: `x - center` is nearly exact in float32 even where `mean / std` is
10,000, while `a*x + b` would lose the significant digits. A float64 term corrects for `rest = mean - center`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client.ops.statistics import (
    ChannelMoments,
    ChannelStatistics,
    along_channels,
    at_least_one,
    compute_type,
    dense,
    same_layout,
    to_compute_type,
    to_float64,
    vector_device,
)
from client.transports.device_rows import Count


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The backend of elementwise operators, with masks."""

    mask: Tensor | None = None  # shape (N, *), bool: which positions count for the statistics; None for all

    def moments(self, x: Tensor) -> ChannelMoments:
        """Compute the mean first, then sums of the centred values."""
        number = count(x, self.mask)
        least = at_least_one(number)
        values = where(self.mask, x.to(compute_type(x)))
        center = total(values) / (least if isinstance(least, int) else least.to(compute_type(x)).to(x.device))
        deviations = where(self.mask, values - along_channels(center, x))
        center, first, second = to_float64(x, center, total(deviations), total(deviations.square()))
        # Infinite values give an infinite center and a NaN as the sum of deviations, which must not be added.
        mean = torch.where(center.isinf(), center, center + first / least)
        return ChannelMoments.from_centred(number, mean, second - first * first / least, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalise all positions, also those that the mask excludes."""
        zero = torch.zeros_like(statistics.mean)
        vectors = affine_vectors(statistics, statistics.invstd, zero, compute_type(x))
        return apply_affine(x, vectors, weight, bias).to(x.dtype)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Compute the sums around the rounded mean, and correct its rounding error."""
        return self.sums_around(*rounded(statistics, compute_type(x)), grad, x)

    def sums_around(self, center: Tensor, rest: Tensor, grad: Tensor, x: Tensor) -> Tensor:
        """Sums around `center + rest`: the mean in the compute type, and its rounding error."""
        grad = grad.to(compute_type(x))
        deviations = minus(x, center)
        if self.mask is not None:  # see `engine.backward_sums`
            deviations = deviations.masked_fill(~self.mask.unsqueeze(1) & (grad == 0), 0)
        first, second = self._totals(x, grad, deviations.mul_(grad))
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Propagate the statistics' gradient only to positions that count."""
        return self.gradient(grad, x, statistics.invstd, gradient_vectors(statistics, means, compute_type(x)), weight)

    def gradient(self, grad: Tensor, x: Tensor, invstd: Tensor, vectors: Tensor, weight: Tensor | None) -> Tensor:
        """dx, given the result of `gradient_vectors`."""
        through_statistics = where(self.mask, apply_affine(x, vectors, weight))
        return through_statistics.add_(scaled(grad, invstd, weight)).to(x.dtype)

    def _totals(self, x: Tensor, *values: Tensor) -> Sequence[Tensor]:
        """Float64 sums per channel of values of the shape of `x`."""
        return to_float64(x, *map(total, values))


class Traced(Reference):
    """The reference for compiled code: compilers fuse conversions with sums, so float64 throughout is cheap."""

    __slots__ = ()

    def moments(self, x: Tensor) -> ChannelMoments:
        """Read the input once, where its device has float64."""
        if vector_device(x) != x.device:
            return super().moments(x)
        values = where(self.mask, x.double())
        vectors = torch.stack([*self._totals(x, values, values.square())])
        return ChannelMoments(count(x, self.mask), vectors, tuple(x.shape))

    def _totals(self, x: Tensor, *values: Tensor) -> Sequence[Tensor]:
        if vector_device(x) != x.device:
            return super()._totals(x, *values)
        return [each.double().sum([0, *range(2, x.dim())]) for each in values]


class Fused:
    """The backend of the fused operators of torch's SyncBatchNorm: no masks.

    A second measurement of the moments, around the mean, finds the rounding error of the float32 mean: no digit is
    lost, but the input is read twice more. To skip the second measurement for a mean near zero, the host
    would have to wait for the mean.
    """

    def supports(self, x: Tensor) -> bool:
        """Support all tensors on CUDA."""
        return x.is_cuda

    def moments(self, x: Tensor) -> ChannelMoments:
        """Compute the mean first, then mean and variance of the centred values."""
        x = dense(x)
        center, _ = torch.batch_norm_update_stats(x, None, None, 0.0)
        rest, variance = torch.batch_norm_update_stats(x - along_channels(center, x), None, None, 0.0)
        number, center = count(x, None), center.double()
        # An infinite center is the mean of infinite values; adding the difference would give NaN.
        mean = torch.where(center.isinf(), center, center + rest.double())
        return ChannelMoments.from_centred(number, mean, variance.double() * number, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Correct the rounding error of the mean by a term in the bias."""
        x, wide = dense(x), compute_type(x)
        center, rest = rounded(statistics, wide)
        weight = _weight_of(x, weight)
        addend = (-rest * statistics.invstd).to(wide) * weight
        if bias is not None:
            addend = (addend + bias.detach()).to(wide)  # a wider bias would widen the sum
        return torch.batch_norm_elemt(x, weight, addend, center, statistics.invstd.to(wide), 0.0)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Compute the sums around the rounded mean, and correct its rounding error."""
        grad, x = same_layout(grad, x)
        center, rest = rounded(statistics, compute_type(x))
        invstd, ones = statistics.invstd.to(compute_type(x)), _weight_of(x, None)
        # In half precision torch's kernels, except those for channels_last, round partial sums.
        is_channels_last = x.stride(1) == 1 or x.numel() == x.shape[0] * x.shape[1]
        if x.dtype in {torch.float16, torch.bfloat16} and not is_channels_last:
            grad, x = grad.float(), x.float()
        # Request only the sums for the input's gradient: the gradients of weight and bias follow from them.
        first, second, *_ = torch.batch_norm_backward_reduce(grad, x, center, invstd, ones, True, False, False)  # noqa: FBT003
        first, second = first.double(), second.double()
        return torch.stack((first, second - rest * first))

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Correct the rounding error of the input's mean by a term in the gradient's mean."""
        grad, x = same_layout(grad, x)
        invstd, wide = statistics.invstd, compute_type(x)
        center, rest = rounded(statistics, wide)
        first = means[0] - rest * (invstd * invstd * means[1])
        # `means` are divided already, because the operator's count has only 32 bits.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        vectors = center, invstd.to(wide), _weight_of(x, weight), first.to(wide), means[1].to(wide)
        return torch.batch_norm_backward_elemt(grad, x, *vectors, one)


def _weight_of(x: Tensor, weight: Tensor | None) -> Tensor:
    """A layer's weight, or ones, in the compute type of `x`: the operators expect statistics of the weight's type."""
    if weight is None:
        return torch.ones(x.shape[1], dtype=compute_type(x), device=x.device)
    return weight.detach().to(compute_type(x))


def count(x: Tensor, mask: Tensor | None) -> Count:
    """Number of values per channel that count for the statistics."""
    if mask is None:
        return x.numel() // x.shape[1]
    # Sums of booleans are exact on every device.
    return to_float64(x, mask.sum())[0]


def affine(x: Tensor, statistics: ChannelStatistics, by_centred: Tensor, constant: Tensor) -> Tensor:
    """by_centred * (x - mean) + constant in the compute type, from vectors of shape (C,)."""
    return apply_affine(x, affine_vectors(statistics, by_centred, constant, compute_type(x)))


def affine_vectors(statistics: ChannelStatistics, by_centred: Tensor, constant: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors of `apply_affine` for by_centred * (x - mean) + constant, shape (3, C)."""
    center, rest = rounded(statistics, dtype)
    return torch.stack((center, by_centred.to(dtype), (constant - by_centred * rest).to(dtype)))


def gradient_vectors(statistics: ChannelStatistics, means: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors of `apply_affine` for the gradient through the statistics, see `engine.input_gradient`."""
    invstd = statistics.invstd
    return affine_vectors(statistics, -invstd * (invstd * invstd * means[1]), -invstd * means[0], dtype)


def apply_affine(x: Tensor, vectors: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """((x - center) * factor + addend) * weight + bias for the three `vectors`, shape (3, C); the result is dense."""
    center, factor, addend = vectors.to(x.device, non_blocking=True).unbind()
    if weight is not None:
        factor, addend = factor * weight, addend * weight
    if bias is not None:
        addend = addend + bias
    deviations = dense(minus(x, center))
    return deviations.mul_(along_channels(factor, x)).add_(along_channels(addend, x))


def scaled(x: Tensor, factor: Tensor, weight: Tensor | None = None) -> Tensor:
    """Product x * factor * weight, with vectors of shape (C,)."""
    (by,) = to_compute_type(x, factor)
    return x * along_channels(by if weight is None else by * weight, x)


def rounded(statistics: ChannelStatistics, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean rounded to a type, and the rounding error in float64."""
    mean = statistics.mean
    center = mean.to(dtype)
    return center, mean - center.double()


def minus(x: Tensor, center: Tensor) -> Tensor:
    """Difference x - center in the compute type, for a vector of shape (C,)."""
    return x.to(compute_type(x)) - along_channels(center.to(x.device, non_blocking=True), x)


def where(mask: Tensor | None, x: Tensor) -> Tensor:
    """`x` with 0 where the mask is False."""
    return x if mask is None else x.clone().masked_fill_(~mask.unsqueeze(1), 0)  # masked_fill would change the layout


def total(x: Tensor) -> Tensor:
    """Sum per channel, positions first.

    A sum in one call adds the samples one by one: over millions in float32 its error reaches percents.
    """
    positions = list(range(2, x.dim()))
    return (x.sum(positions) if positions else x).sum(0)
