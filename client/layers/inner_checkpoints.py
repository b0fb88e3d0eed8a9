"""Inner checkpoints: those that a subclass's own `forward` puts around its call of `batch_norm`.

Such a call is computed again in the backward pass, where nobody looks at it: it would be normalised by this replica's
statistics alone. So would that of an `autograd.Function` of the subclass's own, whose backward pass is its own as well.
Most checkpoints are seen by their names when the model is converted; the others here, when they run.
"""

import sys
from collections.abc import Set as AbstractSet
from types import CodeType, FrameType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils import checkpoint

from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError

# A checkpoint that is a function of autograd itself is found first: it calls what is inside it.
_CHECKPOINT = checkpoint.__name__
_AROUND = {
    _CHECKPOINT: "checkpoints its call of batch_norm; checkpoint the layer where it is called",
    torch.autograd.function.__name__: (
        "calls batch_norm in an autograd.Function, whose backward pass would be that of this replica's batch alone; "
        "register a conversion for its class, see help(client.register_conversion)"
    ),
}


def check(layer: Any, caller: CodeType, *, recorded: bool) -> None:
    """Raises ConfigurationError where a checkpoint or an `autograd.Function` has begun since a layer's `forward` has.

    What torch.compile traces in between it computes again as it is.

    Args:
        layer: whose.
        caller: the code of what calls that `forward`.
        recorded: whether torch recorded gradients when it began.
    """
    records = torch.is_grad_enabled()
    if is_compiling() or not (records or recorded):
        return
    # A function that records inside leaves the backward pass to us.
    sought = {_CHECKPOINT} if records == recorded else _AROUND.keys()
    if around := _around(sought, caller):
        raise ConfigurationError(broken(f"layer {layer.layer_name!r}: its forward {_AROUND[around]}"))


def _around(modules: AbstractSet[str], caller: CodeType) -> str | None:
    """Returns which of these modules has called what runs now, if one has since the `forward` was called."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack has no public name
    while frame is not None and frame.f_code is not caller:
        module: str = frame.f_globals.get("__name__", "")
        if module in modules:
            return module
        frame = frame.f_back
    return None
