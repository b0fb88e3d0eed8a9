"""Override of `batch_norm` in the `forward` of a subclass, so that the call is synchronised.

A `TorchFunctionMode` sees each call of a torch function in this thread, and works under torch.compile. A replacement
of `F.batch_norm` in the module of the class would miss helpers in other modules, and affect other threads.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, overrides
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from statsd_bn.errors import ConfigurationError
from statsd_bn.text import wrap

T = TypeVar("T")

_BATCH_NORM, _OPERATOR = F.batch_norm, torch.batch_norm

# torch's function has no public name, and no type.
_innermost_mode: Callable[[], Any] = overrides._get_current_function_mode  # noqa: SLF001

# A checkpoint or an `autograd.Function` in a `forward` may recompute `batch_norm` in the backward pass, when no
# override is active: the recomputed call would use the statistics of this replica alone.
_IN_CHECKPOINT = "checkpoints its call of batch_norm; checkpoint the whole layer instead"
_IN_FUNCTION = (
    "calls batch_norm in an autograd.Function, so its backward pass would use this replica's batch only; "
    "register a conversion for its class, see help(client.register_conversion)"
)


@dataclass(slots=True)
class BatchNormCall:
    """One call of `F.batch_norm` in a `forward`, with the attributes of a layer that a synchronised call reads."""

    # The parameters of `F.batch_norm`, in its order.
    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float | None = 0.1
    eps: float = 1e-5
    num_batches_tracked: Tensor | None = None  # None if the `forward` has incremented it
    track_running_stats: bool = True
    layer_name: str = ""  # this and the next two are the layer's, set when the call is overridden
    eps_mode: str = ""
    group: Any = None

    def belongs_to(self, layer: Any) -> bool:
        """Whether one of the call's tensors is the layer's; a layer without tensors is recognised by its channels."""
        mean, buffers = self.running_mean, layer._buffers.values()  # noqa: SLF001 - `buffers()` includes the children's
        # There may be several running means, such as one for each domain.
        if mean is not None and (mean is layer.running_mean or any(mean is buffer for buffer in buffers)):
            return True
        if self.has_tensors:  # reading a parametrized tensor computes it, so read each only where needed
            has_weight = self.weight is not None and self.weight is layer.weight
            return has_weight or (self.bias is not None and self.bias is layer.bias)
        has_statistics = layer.running_mean is not None and layer.track_running_stats
        return not has_statistics and layer.weight is None and layer.bias is None and self.has_channels_of(layer)

    def has_channels_of(self, layer: Any) -> bool:
        """Whether the input has as many channels as the layer."""
        return bool(self.input.dim() > 1 and self.input.shape[1] == layer.num_features)

    @property
    def has_tensors(self) -> bool:
        """Whether the call has any tensor besides the input; a call without any could belong to any layer."""
        return not (self.running_mean is None and self.weight is None and self.bias is None)

    def forward(self) -> Tensor:
        """Call torch's `batch_norm`."""
        tensors = self.input, self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(*tensors, self.training, 0.0 if self.momentum is None else self.momentum, self.eps)


Compute = Callable[[Any, BatchNormCall, Tensor | None], Tensor]


class BatchNormOverride(TorchFunctionMode):
    """Mode that overrides the calls of `batch_norm` that belong to one layer, and no others."""

    was_called = False
    has_unrelated_calls = False  # whether a call in training has the layer's number of channels, but no tensors

    def __init__(self, layer: Any, compute: Compute, tracked: Tensor | None, caller: CodeType | None = None) -> None:
        self._layer = layer
        self._compute = compute  # gets the layer, the call, and `tracked`
        self._tracked = tracked  # `num_batches_tracked` before the `forward`
        self._caller = caller  # the code that calls the `forward`; None under torch.compile
        self._was_grad_enabled = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle a call of any torch function."""
        kwargs = kwargs or {}
        # A profiler may have replaced `F.batch_norm`; then torch passes the replacement.
        if func is not _BATCH_NORM and func is not _OPERATOR and func is not F.batch_norm:
            return func(*args, **kwargs)
        call = (_call_of_operator if func is _OPERATOR else BatchNormCall)(*args, **kwargs)
        if not call.belongs_to(self._layer):
            self.has_unrelated_calls |= call.training and not call.has_tensors and call.has_channels_of(self._layer)
            return func(*args, **kwargs)
        self.was_called = True
        call.layer_name, call.eps_mode, call.group = self._layer.layer_name, self._layer.eps_mode, self._layer.group
        if self._caller is not None and call.training:
            _check_not_recomputed(self._layer, self._caller, was_grad_enabled=self._was_grad_enabled)
        return self._compute(self._layer, call, self._tracked)


def without_override(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function outside of the innermost override, which would slow down each of its many torch functions."""
    mode = _innermost_mode()
    is_override = isinstance(mode, BatchNormOverride)  # in the `if`, mypy would narrow `mode` to an untyped class
    if not is_override:
        return function(*arguments)
    mode.__exit__(None, None, None)  # pops the innermost mode from torch's stack, where `__enter__` pushes it again
    try:
        return function(*arguments)
    finally:
        mode.__enter__()


def _check_not_recomputed(layer: Any, caller: CodeType, *, was_grad_enabled: bool) -> None:
    """Raise ConfigurationError if a checkpoint or an `autograd.Function` is active inside the layer's `forward`."""
    is_grad_enabled = torch.is_grad_enabled()
    # Under torch.compile the synchronised call is recomputed, not torch's. Without gradients nothing is recomputed.
    if is_compiling() or not (is_grad_enabled or was_grad_enabled):
        return
    # An autograd.Function that enables gradients inside leaves the backward pass to autograd.
    function_codes = set() if is_grad_enabled == was_grad_enabled else _autograd_function_codes()
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack has no public name
    while frame is not None and frame.f_code is not caller:
        # A checkpoint may be an autograd.Function itself.
        is_checkpoint = frame.f_globals.get("__name__") == checkpoint.__name__
        if is_checkpoint or frame.f_code in function_codes:
            problem = _IN_CHECKPOINT if is_checkpoint else _IN_FUNCTION
            raise ConfigurationError(wrap(f"layer {layer.layer_name!r}: its forward {problem}"))
        frame = frame.f_back


def _autograd_function_codes() -> set[CodeType]:
    """Code of the `forward` of each `autograd.Function`: since torch 2.14 its `apply` has no frame."""
    classes: list[type[torch.autograd.Function]] = [torch.autograd.Function]
    for cls in classes:
        classes += cls.__subclasses__()
    return {inspect.unwrap(cls.forward).__code__ for cls in classes}


def _call_of_operator(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *others: Any, **named: Any
) -> BatchNormCall:
    """Return the call for arguments of `torch.batch_norm`; the last one, which selects a kernel, is dropped."""
    named.pop("cudnn_enabled", None)
    return BatchNormCall(input, running_mean, running_var, weight, bias, *others[:3], **named)
