"""Sharded: what torch has dealt out over processes, parameters and whole modules.

Loading torch's classes for that takes a while, and who has made such things has loaded them.
"""

import sys
from collections.abc import Iterator

from torch import Tensor, nn


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
