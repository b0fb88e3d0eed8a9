"""Interception: while somebody else's `forward` runs, its call of `batch_norm` becomes a synchronised one.

Subclasses of torch's layers often have a `forward` of their own, which hands the layer's tensors to `F.batch_norm` and
adds something before or behind: an activation, a drop-out, a second branch. Nothing of that needs to be known here. A
`TorchFunctionMode` sees each function of torch that is called, in this thread only, and torch.compile traces it.
Replacing `F.batch_norm` in the class's own globals was considered: it would not reach a helper in another module, and
would reach other threads. A copy of the `forward` with other globals saved 15 to 35 µs a call, took 660 lines that read
bytecode, and worked in full on one version of Python only.
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

from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError

T = TypeVar("T")

_BATCH_NORM, _OPERATOR = F.batch_norm, torch.batch_norm

# It has no public name, and no type.
_innermost: Callable[[], Any] = overrides._get_current_function_mode  # noqa: SLF001

# What computes a call of `batch_norm` again in the backward pass, where no mode is active any more, so that it would be
# normalised by this replica's statistics alone.
_IN_CHECKPOINT = "checkpoints its call of batch_norm; checkpoint the layer where it is called"
_IN_FUNCTION = (
    "calls batch_norm in an autograd.Function, whose backward pass would be that of this replica's batch alone; "
    "register a conversion for its class, see help(client.register_conversion)"
)


@dataclass(slots=True)
class Handed:
    """What a `forward` hands to `batch_norm`: as much of a layer as one synchronised call needs to know.

    Attributes:
        layer: whose call it is.
        input: shape (N, C, *).
        running_mean: shape (C,), moved by this call; or None.
        running_var: as `running_mean`.
        weight: shape (C,) or None.
        bias: shape (C,) or None.
        training: whether to normalise with the batch's statistics.
        momentum: weight of this batch in the running statistics; None to find it by `num_batches_tracked`.
        eps: keeps the inverse standard deviation finite.
        num_batches_tracked: counted on by this call; None where the `forward` has done so.
        layer_name: the layer's, as of one that is taken over; so is the next.
        eps_mode: the layer's.
    """

    layer: Any
    # As the arguments of `F.batch_norm` are called, and stand.
    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float | None = 0.1
    eps: float = 1e-5
    num_batches_tracked: Tensor | None = None
    track_running_stats: bool = True
    layer_name: str = ""
    eps_mode: str = ""

    @property
    def group(self) -> Any:
        """The layer's."""
        return self.layer.group

    def is_of(self, layer: Any) -> bool:
        """Whether one of these tensors is the layer's own.

        It may have several running means, as one for each domain. A layer without any tensor is known by its channels;
        see `has_tensors`.
        """
        buffers = layer._buffers.values()  # noqa: SLF001 - `buffers()` has its children's
        mean = self.running_mean
        if mean is not None and (self.moves_own(layer) or any(mean is buffer for buffer in buffers)):
            return True
        if self.has_tensors:
            return _is_same(self.weight, layer.weight) or _is_same(self.bias, layer.bias)
        keeps_none = layer.running_mean is None or not layer.track_running_stats
        return keeps_none and layer.weight is None and layer.bias is None and self.has_channels_of(layer)

    def moves_own(self, layer: Any) -> bool:
        """Whether the running mean is the one that the layer keeps under its usual name."""
        is_own: bool = self.running_mean is layer.running_mean
        return is_own

    def has_channels_of(self, layer: Any) -> bool:
        """Whether the input has as many channels as the layer."""
        is_like_layer: bool = self.input.dim() > 1 and self.input.shape[1] == layer.num_features
        return is_like_layer

    @property
    def nr_channels(self) -> int | None:
        """How many the tensors have; more than the layer where parts of a batch are laid beside each other."""
        for given in (self.running_mean, self.weight, self.bias):
            if given is not None:
                return given.shape[0]
        return None

    @property
    def has_tensors(self) -> bool:
        """Whether anything beside the input was handed over; without it nobody can tell two calls apart."""
        return not (self.running_mean is None and self.weight is None and self.bias is None)

    def forward(self) -> Tensor:
        """Computes what was asked for, as torch does."""
        return F.batch_norm(
            self.input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )


Normalise = Callable[[Any, Handed, Tensor | None], Tensor]


class Interception(TorchFunctionMode):
    """Takes over the calls of `batch_norm` with a layer's own tensors; all others go their way.

    Args:
        layer: whose tensors.
        normalise: computes a call that is taken over, from the layer, what was handed over, and `counted`.
        counted: what it needs to know from before the `forward`.
        caller: the code of what calls the `forward`; None where torch compiles it.

    Attributes:
        is_reached: whether there was such a call.
        nr_without_tensors: how many of them had nothing of the layer's but its channels.
        nr_passed_by: how many such calls went their way, because the layer has tensors.
    """

    is_reached = False
    nr_without_tensors = 0
    nr_passed_by = 0

    def __init__(
        self, layer: Any, normalise: Normalise, counted: Tensor | None, caller: CodeType | None = None
    ) -> None:
        self._layer = layer
        self._normalise = normalise
        self._counted = counted
        self._caller = caller
        self._recorded = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        kwargs = kwargs or {}
        # A profiler may have put a function of its own in place of `F.batch_norm`; torch hands over that one.
        if func is not _BATCH_NORM and func is not _OPERATOR and func is not F.batch_norm:
            return func(*args, **kwargs)
        handed = (_of_operator if func is _OPERATOR else Handed)(self._layer, *args, **kwargs)
        if not handed.is_of(self._layer):
            self.nr_passed_by += handed.training and not handed.has_tensors and handed.has_channels_of(self._layer)
            return func(*args, **kwargs)
        self.is_reached = True
        handed.layer_name, handed.eps_mode = self._layer.layer_name, self._layer.eps_mode
        if self._caller is not None and handed.training:
            _check_not_computed_again(self._layer, self._caller, recorded=self._recorded)
        if handed.running_mean is None and not handed.has_tensors:
            self.nr_without_tensors += 1
        return self._normalise(self._layer, handed, self._counted)


def unseen(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function of ours out of sight of an interception: our arithmetic calls hundreds of torch's functions."""
    mode = _innermost()
    is_interception = isinstance(mode, Interception)
    if not is_interception:
        return function(*arguments)
    mode.__exit__(None, None, None)  # takes the innermost mode off torch's stack, where `__enter__` puts it
    try:
        return function(*arguments)
    finally:
        mode.__enter__()


def _check_not_computed_again(layer: Any, caller: CodeType, *, recorded: bool) -> None:
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
    functions = set() if records == recorded else _forwards_of_functions()
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack has no public name
    while frame is not None and frame.f_code is not caller:
        # A checkpoint may be an autograd.Function itself.
        is_checkpoint = frame.f_globals.get("__name__") == checkpoint.__name__
        if is_checkpoint or frame.f_code in functions:
            problem = _IN_CHECKPOINT if is_checkpoint else _IN_FUNCTION
            raise ConfigurationError(broken(f"layer {layer.layer_name!r}: its forward {problem}"))
        frame = frame.f_back


def _forwards_of_functions() -> set[CodeType]:
    """Code of the `forward` of each `autograd.Function`; since torch 2.14 its `apply` has no frame to be found by."""
    classes: list[type[torch.autograd.Function]] = [torch.autograd.Function]
    for one in classes:
        classes += one.__subclasses__()
    return {inspect.unwrap(one.forward).__code__ for one in classes}


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and one is other


def _of_operator(
    layer: Any,
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,  # noqa: ARG001 - a matter of torch's kernels
) -> Handed:
    """As the arguments of `torch.batch_norm` are called, and stand."""
    return Handed(layer, input, running_mean, running_var, weight, bias, training, momentum, eps)
