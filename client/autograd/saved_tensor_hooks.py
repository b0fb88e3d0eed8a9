"""Hooks for saved tensors: what a thread does with what its nodes save for backward, as a checkpoint does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_torchs: Any = torch._C._autograd  # noqa: SLF001 - `torch.autograd.graph` can add hooks, but not say whether there are any

# Torch 2.6 and 2.7 have no such function.
_top: Callable[[bool], _Hooks | None] | None = getattr(_torchs, "_top_saved_tensors_default_hooks", None)


def may_be_there() -> bool:
    """Whether hooks may see what the calling thread saves; always where torch cannot tell."""
    return _top is None or _top(True) is not None  # noqa: FBT003 - torch's way to ask outside of a trace too


@contextmanager
def set_aside() -> Iterator[None]:
    """While it lasts, no hooks see what the calling thread saves, if torch can tell which there are."""
    hooks = []
    while _top is not None and (top := _top(True)) is not None:  # noqa: FBT003 - as above
        hooks.append(top)
        _torchs._pop_saved_tensors_default_hooks()  # noqa: SLF001 - as above
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _torchs._push_saved_tensors_default_hooks(pack, unpack)  # noqa: SLF001 - as above
