"""The plain call: one slice without a mask, whose steps a backend computes in few calls of its own.

All else goes by `client.ops.functional`: replicas, masks, second derivatives. What those need to know of a plain
call is made from its buffers when they ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client.ops.exchange import Exchange
from client.ops.functional import Exchanging, Slice, backward_by_operators
from client.ops.statistics import Running
from client.tracebacks import make_readable
from statsd_bn.errors import StatsdBNError


def is_plain(mine: Slice) -> bool:
    """Whether a slice has nothing special, and no parameter of another length: kernels do not look."""
    x, weight, bias, mask, holder, stream = mine
    channels = x.shape[1:2]
    return (
        mask is None
        and holder is None
        and stream is None
        and (weight is None or weight.shape == channels)
        and (bias is None or bias.shape == channels)
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
    )


@dataclass(slots=True, eq=False)
class PlainExchange(Exchange):
    """One layer's plain call, see `Exchange`.

    Attributes:
        running: the running statistics that the forward pass moves; None where it leaves that to the layer.
    """

    running: Running | None = None

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output for the input, after the forward round if there was none."""
        raise NotImplementedError

    def may_compute(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> bool:
        """Whether `gradients` takes these, which have the shapes of before; hooks may have saved others."""
        raise NotImplementedError

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of input, weight and bias, as far as they are needed."""
        raise NotImplementedError

    def made_when_asked(self, name: str) -> Any:
        """Returns an attribute of `Exchange` that few calls need; None where it is not one of these."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Makes an attribute the first time that something asks for it."""
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
            is_plain = grad.shape == x.shape and (weight is None or weight.shape == x.shape[1:2])
            if torch.is_grad_enabled() or not is_plain or not exchange.may_compute(grad, x, weight):
                return None, *backward_by_operators(exchange, needs, grad, x, weight)
            return None, *exchange.gradients(grad, x, weight, needs)
        except StatsdBNError as error:
            make_readable(error)
            raise


# Takes an exchange, input, weight and bias, and returns the output; see `functional.apply_function`.
batch_norm: Any = super(torch.autograd.Function, _BatchNorm).apply  # it comes from C
