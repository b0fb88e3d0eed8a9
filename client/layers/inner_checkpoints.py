"""Inner checkpoints: those that a subclass's own `forward` puts around its call of `batch_norm`.

Such a call is computed again in the backward pass, where nobody looks at it: it would be normalised by this replica's
statistics alone. Most are seen by their names when the model is converted; the others here, when they run.
"""

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils import checkpoint

from client.autograd import saved_tensor_hooks
from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError


class Beginning:
    """Whether torch recorded gradients, and through which hooks, when a layer's own `forward` began.

    Args:
        caller: the code of what calls that `forward`.
    """

    __slots__ = ("_caller", "_hooks", "_records")

    def __init__(self, caller: CodeType) -> None:
        self._caller = caller
        self._hooks = saved_tensor_hooks.innermost()
        self._records = torch.is_grad_enabled()

    def check(self, layer: Any) -> None:
        """Raises ConfigurationError where a checkpoint has begun since.

        It is looked for only if something has changed. What torch.compile traces in between it computes again as it is.
        """
        if is_compiling():
            return
        is_same = self._records == torch.is_grad_enabled() and self._hooks is saved_tensor_hooks.innermost()
        if not (is_same and saved_tensor_hooks.can_be_told()) and self._is_inside_checkpoint():
            text = "its forward checkpoints its call of batch_norm; checkpoint the layer where it is called"
            raise ConfigurationError(broken(f"layer {layer.layer_name!r}: {text}"))

    def _is_inside_checkpoint(self) -> bool:
        """Whether one has called what runs now, since the `forward` was called."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack has no public name
        while frame is not None and frame.f_code is not self._caller:
            if frame.f_globals.get("__name__") == checkpoint.__name__:
                return True
            frame = frame.f_back
        return False
