"""Vectors: one value per channel, in float64 beside the tensors that they describe; and how those lie in memory.

Where a device has no float64, as MPS, its vectors are on the host, and go to the device in the compute type.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")

_WITH_FLOAT64 = frozenset({"cpu", "cuda"})


def home(x: Tensor) -> torch.device:
    """Returns the device of the float64 vectors of `x`."""
    device = x.device
    return device if device.type in _WITH_FLOAT64 else HOST


def compute_type(x: Tensor) -> torch.dtype:
    """Returns float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def along_channels(values: Tensor, x: Tensor) -> Tensor:
    """Returns a view of `values`, shape (C,), that broadcasts along the channels of `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def narrow(x: Tensor, *vectors: Tensor) -> Sequence[Tensor]:
    """Returns float64 vectors in the compute type of `x` on its device, in one copy."""
    dtype = compute_type(x)
    if vectors[0].device == x.device:
        return [vector.to(dtype) for vector in vectors]
    return torch.stack(vectors).to(dtype).to(x.device, non_blocking=True).unbind()


def widen(x: Tensor, *vectors: Tensor) -> Sequence[Tensor]:
    """Returns vectors on the device of `x` as float64 where its vectors are, in one copy."""
    device = home(x)
    if device == x.device:
        return [vector.double() for vector in vectors]
    return torch.stack(vectors).to(device).double().unbind()


def parameter(values: Tensor) -> Tensor:
    """Returns a parameter, shape (C,), as float64 where its vectors are."""
    return widen(values, values.detach())[0]


# Of dense tensors, by dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def laid_out(x: Tensor) -> Tensor:
    """Returns `x` if it is channels_last, else contiguous.

    Torch's batch norm lays out its output like this, so whoever takes a `view` of that can take one of ours.
    """
    layout = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    return x if x.is_contiguous(memory_format=layout) else x.contiguous()


def dense(x: Tensor) -> Tensor:
    """Returns `x` as the output for it is laid out; a copy only if it is not."""
    if x.is_contiguous() or x.is_contiguous(memory_format=CHANNELS_LAST.get(x.dim(), torch.contiguous_format)):
        return x
    made = torch.empty_like(x)  # what has gaps, but lies as channels_last, stays channels_last
    if made.is_contiguous(memory_format=CHANNELS_LAST.get(x.dim(), torch.contiguous_format)):
        return made.copy_(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def alike(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both dense, in the type and layout of `x`."""
    x = dense(x)
    if grad.stride() != x.stride():
        return torch.empty_like(x).copy_(grad), x  # one copy, also where the type differs too
    return (grad if grad.dtype == x.dtype else grad.to(x.dtype)), x
