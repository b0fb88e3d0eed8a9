"""Stand-ins on the CPU for the operators that `torch.nn.SyncBatchNorm` computes with, which only CUDA has.

With them torch's function runs without a GPU, so that the steps that measure it can be tried.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor


def _shaped(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def _sums(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).sum(1)


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel, in float32 at least."""
    channels = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1).flatten(1)
    return channels.mean(1), (channels.var(1, correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation over all ranks, with an update of the running statistics."""
    del x
    shares = (counts / counts.sum()).unsqueeze(1)
    mean = (means * shares).sum(0)
    variance = ((invstds**-2 - eps + (means - mean).square()) * shares).sum(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """The normalised, scaled and shifted input."""
    del eps
    normalised = (x.to(mean.dtype) - _shaped(mean, x)) * _shaped(invstd, x)
    return (normalised * _shaped(weight, x) + _shaped(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of the gradient and of its product with the deviations, and the parameters' gradients."""
    del wanted
    wide = gradient.to(mean.dtype)
    by_bias, product = _sums(wide), _sums(wide * (x.to(mean.dtype) - _shaped(mean, x)))
    return by_bias, product, (product * invstd).to(weight.dtype), by_bias.to(weight.dtype)


def batch_norm_backward_elemt(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    """The input's gradient."""
    total = counts.sum()
    deviations = x.to(mean.dtype) - _shaped(mean, x)
    through = gradient.to(mean.dtype) - _shaped(sums / total, x)
    return ((through - deviations * _shaped(invstd.square() * products / total, x)) * _shaped(invstd * weight, x)).to(
        x.dtype
    )


STAND_INS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


@contextmanager
def stood_in() -> Iterator[None]:
    """Puts the stand-ins in the places of torch's operators."""
    with ExitStack() as stack:
        for operator in STAND_INS:
            stack.enter_context(mock.patch.object(torch, operator.__name__, operator))
        yield
