"""The autograd functions: one node computes the outputs of all local replicas, with one exchange each way.

On a CPU one thread runs the whole backward pass: with a node for each replica, the first would wait forever for a
sibling that only the same thread can run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from client.ops import checkpointing, engine
from client.ops.exchange import Exchange, PlainExchange
from client.ops.second_order import SecondOrder
from client.ops.statistics import vector_device
from client.tracebacks import hide_internal_frames
from statsd_bn.errors import StatsdBNError
from statsd_bn.round_key import BACKWARD, SECOND_BACKWARD
from statsd_bn.text import wrap

# The `Slice.saver` of a slice that needs no backward pass.
UNSAVED = "unsaved"


class Slice(NamedTuple):
    """Part of the batch of one replica."""

    input: Tensor  # shape (N, C, *)
    weight: Tensor | None  # the replica's copies, shape (C,)
    bias: Tensor | None
    mask: Tensor | None = None  # shape (N, *), bool: which positions count for the statistics
    # Where input, weight and mask are saved for backward: in the batch norm's node if None, nowhere if `UNSAVED`; else
    # a node has saved input and weight, see `save_in_thread`.
    saver: Any = None
    stream: Any = None  # of the replica's device, see `stream_of`


def is_plain(slice_: Slice) -> bool:
    """Whether a slice has no mask, stream or saver, and parameters of C values: kernels do not check lengths."""
    x, weight, bias, *others = slice_
    if any(each is not None for each in others) or torch._C._are_functorch_transforms_active():  # noqa: SLF001 - has no public name
        return False
    return all(values is None or values.shape == x.shape[1:2] for values in (weight, bias))


def save_in_thread(slice_: Slice) -> Slice:
    """Save input and weight in the calling thread, where a checkpoint around this replica sees them.

    The last replica's thread runs the batch norm of all, but a checkpoint's hooks see one thread only. The weight's
    copies on the module's device share its memory, so autograd must detect a change before backward.
    """
    if not torch.is_grad_enabled():  # this thread saves nothing, whatever its siblings do
        weight, bias = (None if vector is None else vector.detach() for vector in (slice_.weight, slice_.bias))
        return Slice(slice_.input.detach(), weight, bias, slice_.mask, UNSAVED, slice_.stream)
    if not checkpointing.may_have_hooks() and not torch._C._are_functorch_transforms_active():  # noqa: SLF001 - private
        return slice_
    if slice_.input.requires_grad:
        x = _Save.apply(slice_.input, None if slice_.weight is None else slice_.weight.detach(), None)
        return slice_._replace(input=x, saver=x.grad_fn)
    # As the output of `_Save` the input would require a gradient, at the cost of a round.
    anchor = _SaveOnly.apply(slice_.input, slice_.weight, slice_.bias)
    return slice_._replace(saver=_Saver(anchor) if anchor.requires_grad else None)


class _Save(torch.autograd.Function):
    """Saves input and weight, and returns the input."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:  # noqa: ARG004 - for `setup_context`
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:  # noqa: ARG004 - torch's
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - torch's signature
        return grad, None, None


class _SaveOnly(torch.autograd.Function):
    """Saves input and weight; the output is never differentiated, and without elements uses no memory."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:  # noqa: ARG004 - for `setup_context`
        return x.new_empty(0)

    setup_context = _Save.setup_context


@dataclass(frozen=True, slots=True)
class _Saver:
    """A `_SaveOnly` node with its output, because in torch 2.6 a node ends with its output."""

    output: Tensor

    @property
    def saved_tensors(self) -> Any:
        node: Any = self.output.grad_fn
        return node.saved_tensors


def batch_norm(slices: list[Slice], exchange: Exchange) -> list[Tensor]:
    """Normalise the local replicas' slices, in replica order, with the statistics of the whole batch."""
    inputs, weights, biases, masks, savers, _ = zip(*slices, strict=True)
    return list(apply_function(_BatchNorm, exchange, savers, *inputs, *weights, *biases, *masks))


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function.apply` without its search for default arguments, which takes as long as the call."""
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - torch asks the same
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # defined in C


class Exchanging(torch.autograd.Function):
    """A function that sends rounds; its errors name the transforms of torch that it does not support."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            wrap(
                "synchronised batch norm does not support torch.vmap, nor torch.func.jacrev, which uses it; "
                "torch.func.grad and vjp work"
            )
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            wrap(
                "synchronised batch norm has no forward-mode derivative (torch.func.jvp, jacfwd); use backward, "
                "torch.func.grad or vjp"
            )
        )


class _BatchNorm(Exchanging):
    @staticmethod
    def forward(exchange: Exchange, savers: list[Any], *tensors: Any) -> tuple[Tensor, ...]:  # noqa: ARG004 - below
        inputs, weights, biases, masks = _split(tensors, 4)
        if exchange.key is None:
            exchange.forward([engine.moments(x, mask) for x, mask in zip(inputs, masks, strict=True)])
        outputs = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            exchange.check_count(x.shape)
            outputs.append(engine.normalise(x, exchange.statistics, weight, bias))
        return tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.exchange, ctx.savers, *tensors = inputs
        xs, weights, _, masks = _split(tensors, 4)
        ctx.replicas = len(output)
        own_xs = (x if saver in {None, UNSAVED} else None for x, saver in zip(xs, ctx.savers, strict=True))
        tensors_and_savers = [*zip((*own_xs, *weights, *masks), ctx.savers * 3, strict=True)]
        ctx.unsaved = [None if saver is None else tensor for tensor, saver in tensors_and_savers]
        ctx.save_for_backward(*(tensor if saver is None else None for tensor, saver in tensors_and_savers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = _split(ctx.needs_input_grad[2 : 2 + 3 * ctx.replicas], 3)
        xs, weights, masks = _split(_saved(ctx), 3)
        arguments = _BackwardPass(ctx.exchange, needs), *grads, *xs, *weights, *masks
        # A node, which allows a second derivative, only under `create_graph=True`.
        run = partial(apply_function, _Backward) if torch.is_grad_enabled() else _Backward.forward
        gradients = _run_pass(ctx.exchange, run, arguments)
        return None, None, *gradients, *[None] * ctx.replicas


def _saved(ctx: Any) -> Sequence[Tensor | None]:
    """Inputs, weights and masks, from the batch norm's node or the slices' savers."""
    merged = [own if other is None else other for own, other in zip(ctx.saved_tensors, ctx.unsaved, strict=True)]
    for number, saver in enumerate(ctx.savers):
        if saver not in {None, UNSAVED}:
            merged[number], _ = saver.saved_tensors
    return merged


def _run_pass(exchange: Exchange, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Sequence[Any]:
    """Compute a part of the backward pass in the replicas' streams; a failed round shows the user's frames only."""
    try:
        return _run_in_streams(exchange.streams, run, arguments) if exchange.streams else run(*arguments)
    except StatsdBNError as error:
        hide_internal_frames(error, for_caller=True)
        raise


@dataclass(slots=True)
class _BackwardPass:
    """One backward pass of a call, with the results that a second derivative needs."""

    exchange: Exchange
    needs: list[tuple[bool, ...]]  # whether the inputs, weights and biases need gradients
    local: list[Tensor] = field(default_factory=list)  # Σdy and Σdy·(x-mean) of each local replica, shape (2, C)
    total: Tensor | None = None  # their sums over all replicas; None if no input needs a gradient


class _Backward(Exchanging):
    """The first backward, as a function that can be differentiated itself."""

    @staticmethod
    def forward(backward_pass: _BackwardPass, *tensors: Any) -> tuple[Tensor | None, ...]:
        grads, inputs, weights, masks = _split(tensors, 4)
        statistics = backward_pass.exchange.statistics
        prepared = [engine.prepare_backward(*slice_) for slice_ in zip(grads, inputs, masks, strict=True)]
        backward_pass.local = [
            engine.backward_sums(grad, x, statistics, mask) for (grad, x), mask in zip(prepared, masks, strict=True)
        ]
        by_weight, by_bias = zip(
            *[engine.parameter_gradients(sums, statistics) for sums in backward_pass.local], strict=True
        )
        needs_input, needs_weight, needs_bias = backward_pass.needs
        by_input: list[Tensor | None] = [None] * len(inputs)
        # Only the inputs' gradients need the other replicas; parameters keep their local sums, as under DDP.
        if any(needs_input):
            backward_pass.total = total = backward_pass.exchange.backward(BACKWARD, backward_pass.local)
            by_input = [
                engine.input_gradient(grad, x, statistics, total, weight, mask)
                for (grad, x), weight, mask in zip(prepared, weights, masks, strict=True)
            ]
        needs_parameters, by_parameter = (*needs_weight, *needs_bias), (*by_weight, *by_bias)
        return *by_input, *(
            engine.to_parameter(values, x) if need else None
            for need, values, x in zip(needs_parameters, by_parameter, (*inputs, *inputs), strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:  # noqa: ARG004
        ctx.backward_pass, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        replicas = len(ctx.backward_pass.local)
        arguments = ctx.backward_pass, *ctx.saved_tensors, *gradients
        gradients_of_pass = _run_pass(ctx.backward_pass.exchange, _SecondBackward.apply, arguments)
        return None, *gradients_of_pass, *[None] * replicas


class _SecondBackward(Exchanging):
    """The gradient of the first backward."""

    @staticmethod
    def forward(backward_pass: _BackwardPass, *tensors: Any) -> tuple[Tensor | None, ...]:
        statistics = backward_pass.exchange.statistics
        *saved, by_input, by_weight, by_bias = _split(tensors, 7)
        of_parts = zip(*saved, backward_pass.local, by_input, by_weight, by_bias, strict=True)
        parts = [SecondOrder(statistics.on(vector_device(part[1])), *part) for part in of_parts]
        if backward_pass.total is None:
            return *(part.without_input() for part in parts), *[None] * 2 * len(parts)
        local = [part.sums() for part in parts]
        second = backward_pass.exchange.backward(SECOND_BACKWARD, local)
        gradients = [part.gradients(backward_pass.total, second, sums) for part, sums in zip(parts, local, strict=True)]
        by_grad, by_input, by_weight = zip(*gradients, strict=True)
        return *by_grad, *by_input, *by_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("synchronised batch norm supports first and second derivatives, not the third")


class _PlainBatchNorm(Exchanging):
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
            if gradients is None:  # by operators, which can be differentiated again
                backward_pass = _BackwardPass(exchange, [(need,) for need in needs])
                gradients = apply_function(_Backward, backward_pass, grad, x, weight, None)
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise
        return None, *gradients


# (exchange, input, weight, bias) -> output, for a plain call; see `apply_function`.
plain_batch_norm: Any = super(torch.autograd.Function, _PlainBatchNorm).apply  # defined in C


def _split(values: Any, parts: int) -> list[Any]:
    """`parts` sequences of equal length."""
    size = len(values) // parts
    return [values[part * size : (part + 1) * size] for part in range(parts)]


# CUDA streams: one thread computes for all replicas of a process, each on its own device. It uses the stream of the
# replica's own thread, in which the input is computed; in another stream the batch norm could read it too early.


def stream_of(x: Tensor) -> Any:
    """The calling thread's stream on the device of `x`; None on devices without streams."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


@contextmanager
def in_streams(streams: Iterable[Any]) -> Iterator[None]:
    """Make streams the current ones of this thread, each on its device."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def _run_in_streams(streams: Sequence[Any], run: Callable[..., Any], arguments: tuple[Any, ...]) -> Sequence[Any]:
    """Compute a part of a backward pass in the replicas' streams, and return its results.

    Autograd passes gradients in its thread's current streams, and expects the results there, so the streams wait for
    each other before and after. Tensors that pass from one stream to another are recorded with the allocator, which
    could otherwise reuse their memory before the other stream has read them.
    """
    # If replicas share a device, the stream entered last is current there, as in the forward pass.
    latest = {stream.device: stream for stream in streams}
    own = {device: torch.cuda.current_stream(device) for device in latest}
    others = {device: stream for device, stream in latest.items() if stream != own[device]}
    for device, stream in others.items():
        stream.wait_stream(own[device])
    _record_streams(arguments, others)
    with in_streams(others.values()):
        results: Sequence[Any] = run(*arguments)
    for device, stream in others.items():
        own[device].wait_stream(stream)
    _record_streams(results, {device: own[device] for device in others})
    return results


def _record_streams(values: Iterable[Any], streams: Mapping[torch.device, Any]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.device in streams:
            value.record_stream(streams[value.device])
