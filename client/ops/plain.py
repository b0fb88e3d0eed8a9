"""The plain call: one slice without a mask, computed by a backend in one step forward and one step backward.

Replicas, masks and second derivatives use `client.ops.functional`. The plain call creates the values that these need
lazily, from its buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client.ops.exchange import Exchange
from client.ops.functional import Exchanging, Slice, backward_by_operators
from client.ops.statistics import Running
from client.tracebacks import hide_internal_frames
from statsd_bn.errors import StatsdBNError


def is_plain(mine: Slice) -> bool:
    """Whether a slice has no mask, stream or saver, and parameters of C values; kernels do not check lengths."""
    x, weight, bias, mask, saver, stream = mine
    channels = x.shape[1:2]
    return (
        mask is None
        and saver is None
        and stream is None
        and (weight is None or weight.shape == channels)
        and (bias is None or bias.shape == channels)
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
    )


@dataclass(slots=True, eq=False)
class PlainExchange(Exchange):
    """One layer's plain call, see `Exchange`.

    Attributes:
        running: the running statistics to update in the forward pass; None where the layer updates them.
    """

    running: Running | None = None

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output; runs the forward round first if it has not run yet."""
        raise NotImplementedError

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...] | None:
        """Returns the gradients of input, weight and bias; None for those not needed.

        Returns None for all where the backend does not support the tensors, which users or saved-tensor hooks may have
        changed since the forward pass.
        """
        raise NotImplementedError

    def made_when_asked(self, name: str) -> Any:
        """Returns an attribute of `Exchange` that few calls need; None for any other name."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Creates an attribute on first access."""
        value = self.made_when_asked(name)
        if value is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, value)
        return value


class _BatchNorm(Exchanging):
    @staticmethod
    def forward(ctx: Any, exchange: PlainExchange, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(x, weight)
        return exchange.normalise(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        exchange: PlainExchange = ctx.exchange
        _, *needs = ctx.needs_input_grad
        try:
            gradients = None if torch.is_grad_enabled() else exchange.gradients(grad, x, weight, needs)
            return None, *(gradients or backward_by_operators(exchange, needs, grad, x, weight))
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise


# (exchange, input, weight, bias) -> output; see `functional.apply_function`.
batch_norm: Any = super(torch.autograd.Function, _BatchNorm).apply  # defined in C
