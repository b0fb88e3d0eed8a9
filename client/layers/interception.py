"""Interception: while somebody else's `forward` runs, its call of `batch_norm` becomes a synchronised one.

Subclasses of torch's layers often have a `forward` of their own, which hands the layer's tensors to `F.batch_norm` and
adds something before or behind: an activation, a drop-out, a second branch. Nothing of that needs to be known here. A
`TorchFunctionMode` sees each function of torch that is called, in this thread only, and torch.compile traces it.
Replacing `F.batch_norm` in the class's own globals was considered: it would not reach a helper in another module, and
would reach other threads. `client.layers.shortcut` does so in a copy of the `forward`, to save time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode

from client.layers import inner_checkpoints

T = TypeVar("T")

_BATCH_NORM, _OPERATOR = F.batch_norm, torch.batch_norm

# They have no public names, and no types. Pop and push are what a mode's own `with` calls, which takes longer.
innermost: Callable[[], Any] = overrides._get_current_function_mode  # noqa: SLF001
pop: Callable[[], Any] = torch._C._pop_torch_function_stack  # noqa: SLF001
push: Callable[[Any], None] = torch._C._push_on_torch_function_stack  # noqa: SLF001
_nr_modes: Callable[[], int] = torch._C._len_torch_function_stack  # noqa: SLF001
_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at  # noqa: SLF001


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
        # A buffer is found here sooner than by its name, and most calls end here.
        if self.running_mean is not None and self.running_mean is layer._buffers.get("running_mean"):  # noqa: SLF001 - torch's
            return True
        if self.running_mean is not None and (self.moves_own(layer) or _is_one_of(self.running_mean, layer)):
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
    _recorded: bool | None = None

    def __init__(
        self, layer: Any, normalise: Normalise, counted: Tensor | None, caller: CodeType | None = None
    ) -> None:
        self._layer = layer
        self._normalise = normalise
        self._counted = counted
        self._caller = caller

    def begin(self) -> None:
        """Sees what the calling thread computes from now on; notes whether torch records gradients."""
        if self._caller is not None:
            self._recorded = torch.is_grad_enabled()
        push(self)

    def end(self) -> None:
        """Sees no more; nor did it begin if Ctrl-C came before that."""
        depth = _nr_modes()
        if depth and _mode_at(depth - 1) is self:  # as `innermost`, which is one call more
            pop()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        # A profiler may have put a function of its own in place of `F.batch_norm`; torch hands over that one.
        if func is not _BATCH_NORM and func is not _OPERATOR and func is not F.batch_norm:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.take(func, *args, **(kwargs or {}))

    def take(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes a call of `batch_norm`; torch does where it is not with the layer's own tensors."""
        handed = (_of_operator if func is _OPERATOR else Handed)(self._layer, *args, **kwargs)
        if not handed.is_of(self._layer):
            self.nr_passed_by += handed.training and not handed.has_tensors and handed.has_channels_of(self._layer)
            return func(*args, **kwargs)
        self.is_reached = True
        handed.layer_name, handed.eps_mode = self._layer.layer_name, self._layer.eps_mode
        if self._caller is not None and self._recorded is not None and handed.training:
            inner_checkpoints.check(self._layer, self._caller, recorded=self._recorded)
        if handed.running_mean is None and not handed.has_tensors:
            self.nr_without_tensors += 1
        return self._normalise(self._layer, handed, self._counted)


def unseen(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function of ours out of sight of an interception: our arithmetic calls hundreds of torch's functions."""
    if not isinstance(innermost(), Interception):
        return function(*arguments)
    interception = pop()
    try:
        return function(*arguments)
    finally:
        push(interception)


def _is_one_of(tensor: Tensor, layer: Any) -> bool:
    """Whether it is a buffer of the layer itself."""
    return any(tensor is buffer for buffer in layer._buffers.values())  # noqa: SLF001 - `buffers()` has its children's


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
