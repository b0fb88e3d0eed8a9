"""Inputs: what a layer takes, and the words for what it does not; and what torch has dealt out over processes.

Loading torch's classes of the latter takes a while, and who has made such things has loaded them.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from statsd_bn.error_text import broken


def check(layer: Any, x: Tensor, expected: int | None = None) -> None:
    """Raises TypeError or ValueError where a layer cannot take an input of shape (N, C, *).

    A layer that does not know its channels yet takes them from its tensors, or from the input. Where channels were
    pruned by hand, so that `num_features` is another number, the input may have as many as the tensors.

    Args:
        layer: which one.
        x: the input.
        expected: its channels; None for the layer's.
    """
    if not x.is_floating_point():
        remedy = "; quantise client.revert_model(model)" if x.is_quantized else ""
        raise TypeError(broken(f"layer {layer.layer_name!r}: expected a floating-point input, got {x.dtype}{remedy}"))
    if layer.num_features == 0:
        layer.num_features = channels_of(layer, x.shape[1])
    channels = x.shape[1]
    # torch.jit.trace makes a tensor of it, and warns of whoever asks for its value; torch's operator asks again.
    if isinstance(channels, Tensor) or (expected is None and channels == layer.num_features):
        return
    expected = channels_of(layer, layer.num_features) if expected is None else expected
    if channels != expected:
        raise ValueError(
            broken(
                f"layer {layer.layer_name!r}: expected {expected} channels, got {channels} "
                f"(input of shape {tuple(x.shape)})"
            )
        )


def check_local(layer: Any, *tensors: Tensor | None) -> None:
    """Raises TypeError where a tensor is distributed by torch: its parts belong to several processes already."""
    if any(map(is_distributed, tensors)):
        raise TypeError(
            broken(
                f"layer {layer.layer_name!r}: expected an input and parameters that are this process's own, got a "
                "DTensor; "
                "pass the to_local() of an input that is sharded by samples, and keep the layer's parameters whole"
            )
        )


def check_mask(layer: Any, x: Tensor, mask: Tensor) -> None:
    """Raises TypeError or ValueError where a mask is not boolean, of shape (N, *), and where the input is."""
    if mask.dtype != torch.bool:
        raise TypeError(f"layer {layer.layer_name!r}: expected a boolean mask, got {mask.dtype}")
    expected = (x.shape[0], *x.shape[2:])
    if mask.shape != expected or mask.device != x.device:
        raise ValueError(
            broken(
                f"layer {layer.layer_name!r}: expected a mask of shape {tuple(expected)} on {x.device}, as the input "
                f"without its channels, got {tuple(mask.shape)} on {mask.device}"
            )
        )


def channels_of(layer: Any, otherwise: int) -> int:
    """The channels of a layer's tensors; of one without tensors what is given.

    Torch's lazy layers leave `num_features` at 0 where they have no tensor, or loaded theirs.
    """
    for tensor in (layer.weight, layer.running_mean):
        if tensor is not None:
            channels: int = tensor.shape[0]
            return channels
    return otherwise


def is_distributed(tensor: Tensor | None) -> bool:
    """Whether a tensor is a DTensor, of which this process has a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields what FSDP, of either version, has in its hands: it has made classes or wrappers of its own of it.

    Of a model in a FullyShardedDataParallel a part does not show that it is one.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ()
    for part in module.modules():
        if isinstance(part, wrappers):
            yield from part.modules()
        elif any(map(is_distributed, part.parameters(recurse=False))):
            yield part  # of a model that was sharded as a whole
