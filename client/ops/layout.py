"""How tensors lie in memory: dense, as contiguous or as channels_last."""

import torch
from torch import Tensor

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
