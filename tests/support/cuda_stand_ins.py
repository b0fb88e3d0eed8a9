"""CPU stand-ins for the CUDA-only operators of torch's SyncBatchNorm, as their documentation describes them."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from client.ops import reference
from client.ops.reference import Fused
from client.ops.statistics import CHANNELS_LAST, compute_type
from support.transports import rows_on_devices


def check(x, *vectors):
    assert x.is_contiguous() or x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
    for vector in vectors:
        assert vector.dtype == compute_type(x)
        assert vector.shape == (x.shape[1],)
        assert vector.is_contiguous()


def spread(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_elemt(x, weight, bias, mean, invstd, _eps):
    check(x, weight, bias, mean, invstd)
    wide = x.to(mean.dtype)
    return ((wide - spread(mean, x)) * spread(invstd, x) * spread(weight, x) + spread(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, *wanted):
    assert wanted == (True, False, False)
    check(x, mean, invstd, weight)
    assert (grad.dtype, grad.stride()) == (x.dtype, x.stride())
    wide = grad.to(mean.dtype)
    sums = reference.total(wide), reference.total(wide * (x.to(mean.dtype) - spread(mean, x)))
    if x.stride(1) == 1 or math.prod(x.shape[2:]) == 1:
        return *sums, None, None
    return *(each.to(x.dtype).to(mean.dtype) for each in sums), None, None  # as torch 2.11 was seen to round them


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    check(x, mean, invstd, weight, sum_dy, sum_dy_xmu)
    assert (grad.dtype, grad.stride()) == (x.dtype, x.stride())
    assert count.dtype == torch.int32
    total = count.sum()
    by_deviation = spread(invstd.square() * sum_dy_xmu / total, x)
    deviations = x.to(mean.dtype) - spread(mean, x)
    through = grad.to(mean.dtype) - spread(sum_dy / total, x) - deviations * by_deviation
    return (through * spread(invstd * weight, x)).to(x.dtype)


def batch_norm_update_stats(x, running_mean, running_var, momentum):
    check(x)
    assert (running_mean, running_var, momentum) == (None, None, 0.0)
    wide = x.to(compute_type(x))
    mean = reference.total(wide) / (x.numel() // x.shape[1])
    return mean, reference.total((wide - spread(mean, x)).square()) / (x.numel() // x.shape[1])


STAND_INS = (batch_norm_elemt, batch_norm_backward_reduce, batch_norm_backward_elemt, batch_norm_update_stats)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    with ExitStack() as stack:
        for stand_in in STAND_INS:
            stack.enter_context(mock.patch.object(torch, stand_in.__name__, stand_in))
        yield


@contextmanager
def as_on_cuda(device: str) -> Iterator[None]:
    """Lets the CPU replace CUDA: rows stay on the CPU, stand-ins replace CUDA's operators. Changes nothing on CUDA."""
    if device == "cuda":
        yield
        return
    with rows_on_devices(), on_the_cpu(), mock.patch.object(Fused, "supports", return_value=True):
        yield
