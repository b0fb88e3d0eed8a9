"""Interception: while somebody else's `forward` runs, its call of `batch_norm` becomes a synchronised one.

Subclasses of torch's layers often have a `forward` of their own, which hands the layer's tensors to `F.batch_norm` and
adds something before or behind: an activation, a drop-out, a second branch. Nothing of that needs to be known here. A
`TorchFunctionMode` sees each function of torch that is called, in this thread only, and torch.compile traces it.
Replacing `F.batch_norm` in the class's own globals was considered: it would not reach a helper in another module, and
would reach other threads.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.overrides import TorchFunctionMode


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
    """

    layer: Any
    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    training: bool
    momentum: float | None
    eps: float
    num_batches_tracked: Tensor | None = None
    track_running_stats: bool = True

    @property
    def layer_name(self) -> str:
        """The layer's."""
        name: str = self.layer.layer_name
        return name

    @property
    def eps_mode(self) -> str:
        """The layer's."""
        mode: str = self.layer.eps_mode
        return mode

    @property
    def group(self) -> Any:
        """The layer's."""
        return self.layer.group

    def is_of(self, layer: Any) -> bool:
        """Whether these are the layer's own tensors: its running statistics, or without them its weight."""
        if self.running_mean is not None:
            return self.running_mean is layer.running_mean
        return self.weight is layer.weight and self.bias is layer.bias

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


class Interception(TorchFunctionMode):
    """Takes over the calls of `batch_norm` with a layer's own tensors; all others go their way.

    Args:
        layer: whose tensors.
        normalise: computes a call that is taken over.

    Attributes:
        is_reached: whether there was such a call.
    """

    def __init__(self, layer: Any, normalise: Callable[[Handed], Tensor]) -> None:
        super().__init__()
        self.is_reached = False
        self._layer = layer
        self._normalise = normalise

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        given = kwargs or {}
        if func is F.batch_norm or func is torch.batch_norm:
            read = _of_functional if func is F.batch_norm else _of_operator
            handed = read(self._layer, *args, **given)
            if handed.is_of(self._layer):
                self.is_reached = True
                return self._normalise(handed)
        return func(*args, **given)


def _of_functional(
    layer: Any,
    input: Tensor,  # noqa: A002 - torch's name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Handed:
    """As the arguments of `F.batch_norm` are called, and stand."""
    return Handed(layer, input, running_mean, running_var, weight, bias, training, momentum, eps)


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
