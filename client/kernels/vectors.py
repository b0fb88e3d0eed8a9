"""Vectors of length C: between the host, where they are float64, and the device of a slice."""

import numpy as np
import torch
from torch import Tensor

from client.kernels import cuda
from statsd_bn.reduction import FloatArray


def compute_type(x: Tensor) -> torch.dtype:
    """Returns float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def vector(values: FloatArray, x: Tensor) -> Tensor:
    """Returns `values`, shape (C,), on the device of `x` and in its compute type, in memory of their own."""
    return to_device(x, values)[0]


def to_device(x: Tensor, *vectors: FloatArray) -> tuple[Tensor, ...]:
    """One copy for all vectors to the device of `x`, in its compute type; to CUDA nobody waits for it."""
    if x.is_cpu:
        dtype = np.float64 if x.dtype == torch.float64 else np.float32
        return tuple(torch.from_numpy(vector.astype(dtype)) for vector in vectors)
    if x.is_cuda:
        return cuda.to_device(x, *vectors)
    return torch.from_numpy(np.stack(vectors)).to(compute_type(x)).to(x.device).unbind()


def to_host(*vectors: Tensor) -> FloatArray:
    """One copy for all vectors, whatever the device; float64 only on the host, since MPS has none."""
    return torch.stack(vectors).cpu().to(torch.float64).numpy()


def on_host(parameter: Tensor) -> FloatArray:
    """Returns a parameter as float64 on the host, always as a copy.

    `numpy()` makes its storage one that cannot be resized, and FSDP frees a parameter by resizing it. A copy that also
    converts would convert on the device, and MPS has no float64.
    """
    return parameter.detach().cpu().to(torch.float64, copy=True).numpy()


def along_channels(values: Tensor, x: Tensor) -> Tensor:
    """Returns a view of `values`, shape (C,), that broadcasts along the channels of `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
