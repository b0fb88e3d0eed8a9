"""The autograd functions: all local replicas in, all outputs out, one exchange each way.

One node stands for all replicas of a process, because on a CPU one thread runs the whole backward pass: a node for each
replica would wait forever for a sibling that only the same thread can run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from client.ops import checkpointing, engine, streams
from client.ops.exchange import Exchange
from client.ops.second_order import SecondOrder
from client.tracebacks import make_readable
from statsd_bn.error_text import broken
from statsd_bn.errors import StatsdBNError
from statsd_bn.round_key import BACKWARD, SECOND_BACKWARD


class Slice(NamedTuple):
    """What one replica brings.

    Attributes:
        input: shape (N, C, *).
        weight: the replica's copy, shape (C,) or None.
        bias: likewise.
        mask: shape (N, *), bool: which positions count for the statistics; None for all.
        holder: who keeps the input, weight and mask for backward: None for the batch norm's node, which saves them;
            `NOBODY` where they are not saved; or a node that has saved input and weight, see `held`.
        stream: in which the replica's device works for it, see `client.ops.streams`; None where it has none.
    """

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mask: Tensor | None = None
    holder: Any = None
    stream: Any = None


NOBODY = "nobody"


def held(slice_: Slice) -> Slice:
    """Saves the input now, in the calling thread, where a checkpoint around this replica would see it saved.

    The last thread makes the batch norm for all replicas. What that saved, a checkpoint would take for the last
    thread's, or not see. Checkpoints are hooks of their thread; without any, the batch norm may save it.

    The weight is saved too, so that autograd notices if it changes before backward: on the module's device the copies
    share its memory.

    A thread without gradients saves nothing, whatever its siblings do.
    """
    if not torch.is_grad_enabled():
        weight, bias = (None if vector is None else vector.detach() for vector in (slice_.weight, slice_.bias))
        return Slice(slice_.input.detach(), weight, bias, slice_.mask, NOBODY, slice_.stream)
    if not checkpointing.may_have_hooks() and not torch._C._are_functorch_transforms_active():  # noqa: SLF001 - private
        return slice_
    if slice_.input.requires_grad:
        x = _Hold.apply(slice_.input, None if slice_.weight is None else slice_.weight.detach(), None)
        return slice_._replace(input=x, holder=x.grad_fn)
    # With an output of the node for its input, the batch norm would take a round for a gradient nobody wants.
    anchor = _Keep.apply(slice_.input, slice_.weight, slice_.bias)
    return slice_._replace(holder=_Kept(anchor) if anchor.requires_grad else None)


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:  # noqa: ARG004 - for `setup_context`
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:  # noqa: ARG004 - torch's
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - torch's signature
        return grad, None, None


class _Keep(torch.autograd.Function):
    """Saves input and weight; nobody differentiates the output, which has no elements and so keeps no memory."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:  # noqa: ARG004 - for `setup_context`
        return x.new_empty(0)

    setup_context = _Hold.setup_context


@dataclass(frozen=True, slots=True)
class _Kept:
    """What such a node has saved, as long as this is there: in torch 2.6 a node ends with its output."""

    output: Tensor

    @property
    def saved_tensors(self) -> Any:
        node: Any = self.output.grad_fn
        return node.saved_tensors


def batch_norm(slices: list[Slice], exchange: Exchange) -> list[Tensor]:
    """Normalises the local replicas' slices with the statistics of the whole batch.

    Args:
        slices: one per local replica, in replica order.
        exchange: a fresh one for this call, or that of an earlier call that is computed again. Afterwards it knows
            the statistics of the whole batch.

    Returns:
        An output per slice.

    Raises:
        ValueError: the whole batch has one value per channel, or none where there are positions to normalise.
        StatsdBNError: the exchange failed; most kinds are RoundFailed.
    """
    inputs, weights, biases, masks, holders, _ = zip(*slices, strict=True)
    return list(apply_function(_BatchNorm, exchange, holders, *inputs, *weights, *biases, *masks))


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply` without its search for default arguments, which would double the time of the call."""
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - torch asks the same
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # it comes from C


class Exchanging(torch.autograd.Function):
    """A function that sends rounds; its errors say what torch cannot do with it."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            broken(
                "synchronised batch norm cannot be mapped by torch.vmap, which torch.func.jacrev does; "
                "torch.func.grad and vjp work"
            )
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            broken(
                "synchronised batch norm has no forward-mode derivatives, as torch.func.jvp and jacfwd want them; "
                "backward, torch.func.grad and vjp work"
            )
        )


class _BatchNorm(Exchanging):
    @staticmethod
    def forward(exchange: Exchange, holders: list[Any], *tensors: Any) -> tuple[Tensor, ...]:  # noqa: ARG004 - below
        inputs, weights, biases, masks = _split(tensors, 4)
        if not exchange.is_done:
            exchange.forward([engine.moments(x, mask) for x, mask in zip(inputs, masks, strict=True)])
        return tuple([_normalise(exchange, *parts) for parts in zip(inputs, weights, biases, strict=True)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.exchange, ctx.holders, *tensors = inputs
        xs, weights, _, masks = _split(tensors, 4)
        ctx.replicas = len(output)
        if not any(ctx.holders):
            ctx.unsaved = None
            ctx.save_for_backward(*xs, *weights, *masks)
            return
        unheld = (x if holder in {None, NOBODY} else None for x, holder in zip(xs, ctx.holders, strict=True))
        kept = [*zip((*unheld, *weights, *masks), ctx.holders * 3, strict=True)]
        ctx.unsaved = [None if holder is None else tensor for tensor, holder in kept]
        ctx.save_for_backward(*(tensor if holder is None else None for tensor, holder in kept))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = _split(ctx.needs_input_grad[2 : 2 + 3 * ctx.replicas], 3)
        xs, weights, masks = _split(_kept(ctx), 3)
        arguments = _BackwardPass(ctx.exchange, needs), *grads, *xs, *weights, *masks
        # A graph of this pass, and so a node for it, is made only where someone asks for it.
        run = partial(apply_function, _Backward) if torch.is_grad_enabled() else _Backward.forward
        try:
            gradients = streams.computed_in(ctx.exchange.streams, arguments, partial(run, *arguments))
        except StatsdBNError as error:
            make_readable(error)
            raise
        return None, None, *gradients, *[None] * ctx.replicas


def _normalise(exchange: Exchange, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    exchange.check_count(x.shape)
    return engine.normalise(x, exchange.statistics, weight, bias)


def _kept(ctx: Any) -> Sequence[Tensor | None]:
    """Returns inputs, weights and masks, wherever they have been kept."""
    if ctx.unsaved is None:
        saved: Sequence[Tensor | None] = ctx.saved_tensors
        return saved
    kept = [here if there is None else there for here, there in zip(ctx.saved_tensors, ctx.unsaved, strict=True)]
    for number, holder in enumerate(ctx.holders):
        if holder not in {None, NOBODY}:
            kept[number], _ = holder.saved_tensors
    return kept


def backward_by_operators(
    exchange: Exchange, needs: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of one slice's input, weight and bias, which can be differentiated once more.

    Args:
        exchange: the call's.
        needs: which of them are needed.
        grad: of the output.
        x: the input.
        weight: shape (C,) or None.
    """
    this = _BackwardPass(exchange, [(need,) for need in needs])
    found: tuple[Tensor | None, ...] = apply_function(_Backward, this, grad, x, weight, None)
    return found


@dataclass(slots=True)
class _BackwardPass:
    """One backward pass of a call, and what a second derivative needs of it.

    Attributes:
        exchange: the call's.
        needs: whether the inputs, weights and biases need gradients.
        local: shape (2, C) per local replica: its Σdy and Σdy·(x-mean).
        total: their sums over all replicas; None if no input needs a gradient.
    """

    exchange: Exchange
    needs: list[tuple[bool, ...]]
    local: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None


class _Backward(Exchanging):
    """The first backward, as a function that can be differentiated itself."""

    @staticmethod
    def forward(this: _BackwardPass, *tensors: Any) -> tuple[Tensor | None, ...]:
        grads, inputs, weights, masks = _split(tensors, 4)
        statistics = this.exchange.statistics
        slices = zip(grads, inputs, masks, strict=True)
        grads, inputs = zip(*[engine.for_backward(*slice_) for slice_ in slices], strict=True)
        slices = zip(grads, inputs, masks, strict=True)
        this.local = [engine.backward_sums(grad, x, statistics, mask) for grad, x, mask in slices]
        by_weight, by_bias = zip(*[engine.parameter_gradients(sums, statistics) for sums in this.local], strict=True)
        _, needs_weight, needs_bias = this.needs
        return (
            *_input_gradients(this, grads, inputs, weights, masks),
            *_where_needed(needs_weight, by_weight, inputs),
            *_where_needed(needs_bias, by_bias, inputs),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:  # noqa: ARG004
        ctx.backward_pass, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        replicas = len(ctx.backward_pass.local)
        arguments = ctx.backward_pass, *ctx.saved_tensors, *gradients
        run = partial(_SecondBackward.apply, *arguments)
        try:
            found = streams.computed_in(ctx.backward_pass.exchange.streams, arguments, run)
        except StatsdBNError as error:
            make_readable(error)
            raise
        return None, *found, *[None] * replicas


class _SecondBackward(Exchanging):
    """The gradient of the first backward."""

    @staticmethod
    def forward(this: _BackwardPass, *tensors: Any) -> tuple[Tensor | None, ...]:
        statistics = this.exchange.statistics
        *saved, by_input, by_weight, by_bias = _split(tensors, 7)
        parts = [SecondOrder(*part) for part in zip(*saved, this.local, by_input, by_weight, by_bias, strict=True)]
        if this.total is None:
            return *(part.without_input(statistics) for part in parts), *[None] * 2 * len(parts)
        local = [part.sums(statistics) for part in parts]
        second = this.exchange.backward(SECOND_BACKWARD, local)
        found = [part.gradients(statistics, this.total, second, sums) for part, sums in zip(parts, local, strict=True)]
        by_grad, by_input, by_weight = zip(*found, strict=True)
        return *by_grad, *by_input, *by_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("synchronised batch norm has first and second derivatives, and no third")


def _input_gradients(
    this: _BackwardPass,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    masks: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Only the inputs' gradients need the other replicas; parameters keep their local sums, as under DDP."""
    if not any(this.needs[0]):
        return [None] * len(inputs)
    this.total = total = this.exchange.backward(BACKWARD, this.local)
    return [
        engine.input_gradient(grad, x, this.exchange.statistics, total, weight, mask)
        for grad, x, weight, mask in zip(grads, inputs, weights, masks, strict=True)
    ]


def _where_needed(
    needs: tuple[bool, ...], found: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Iterator[Tensor | None]:
    for need, values, x in zip(needs, found, inputs, strict=True):
        yield engine.vector(values, x) if need else None


def _split(values: Any, parts: int) -> list[Any]:
    """Returns `parts` sequences of equal length."""
    size = len(values) // parts
    return [values[part * size : (part + 1) * size] for part in range(parts)]
