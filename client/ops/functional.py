"""The autograd functions: one node computes the outputs of all local replicas, with one exchange each way.

On a CPU one thread runs the whole backward pass: with a node for each replica, the first would wait forever for a
sibling that only the same thread can run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from client.ops import checkpointing, engine
from client.ops.exchange import Exchange, PlainExchange
from client.tracebacks import hide_internal_frames
from statsd_bn.errors import StatsdBNError
from statsd_bn.round_key import BACKWARD, SECOND_BACKWARD
from statsd_bn.text import wrap

# The `Slice.saver` of a slice that needs no backward pass.
UNSAVED = "unsaved"


class Slice(NamedTuple):
    """One replica's part of the batch."""

    input: Tensor  # shape (N, C, *)
    weight: Tensor | None  # of the replica, shape (C,)
    bias: Tensor | None  # of the replica, shape (C,)
    mask: Tensor | None = None  # shape (N, *), bool: which positions count for the statistics
    # Which node saves input and weight for backward. None: the batch norm's node. `UNSAVED`: no node. A function:
    # another node, see `save_in_thread`; the function returns what that node saved.
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

    The last replica's thread runs the batch norm of all, but a checkpoint's hooks see one thread only. A
    replica's weight may share the model's memory; it is saved so that autograd detects a change before backward.
    """
    if not torch.is_grad_enabled():  # this thread saves nothing, whatever its siblings do
        weight, bias = (None if vector is None else vector.detach() for vector in (slice_.weight, slice_.bias))
        return Slice(slice_.input.detach(), weight, bias, slice_.mask, UNSAVED, slice_.stream)
    if not checkpointing.may_have_hooks() and not torch._C._are_functorch_transforms_active():  # noqa: SLF001 - private
        return slice_
    if slice_.input.requires_grad:
        weight = None if slice_.weight is None else slice_.weight.detach()
        x = _Save.apply(slice_.input, weight, None, True)  # noqa: FBT003 - autograd functions have no named arguments
        node = x.grad_fn
        return slice_._replace(input=x, saver=None if node is None else lambda: node.saved_tensors)
    # The input needs no gradient, but if the weight does, so does the output of `_Save`. As the layer's input, that
    # output would cost a round in backward. So the output is empty, and nothing differentiates it.
    anchor = _Save.apply(slice_.input, slice_.weight, slice_.bias, False)  # noqa: FBT003 - as above
    # The saver holds the output: in torch 2.6 a node is freed with its output.
    return slice_._replace(saver=(lambda: anchor.grad_fn.saved_tensors) if anchor.requires_grad else None)


class _Save(torch.autograd.Function):
    """Saves input and weight, and returns the input, or an empty tensor."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, returns_input: bool) -> Tensor:  # noqa: ARG004 - for `setup_context`
        return x.view_as(x) if returns_input else x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004 - torch's
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - torch's signature
        return grad, None, None, None


def batch_norm(slices: list[Slice], exchange: Exchange) -> list[Tensor]:
    """Normalise the local replicas' slices, in replica order, with the statistics of the whole batch."""
    tensors = chain.from_iterable(slice_[:4] for slice_ in slices)
    return list(apply_function(_BatchNorm, exchange, [slice_.saver for slice_ in slices], *tensors))


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function.apply` without its search for default arguments, which takes as long as the call."""
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - torch asks the same
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # defined in C


class Exchanging(torch.autograd.Function):
    """A function that runs rounds; its errors name the transforms of torch that it does not support."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:  # noqa: ARG004 - torch's signature
        """Raise NotImplementedError."""
        limit = "does not support torch.vmap, nor torch.func.jacrev, which uses it; torch.func.grad and vjp work"
        raise NotImplementedError(wrap(f"synchronised batch norm {limit}"))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ARG004 - torch's signature
        """Raise NotImplementedError."""
        limit = "has no forward-mode derivative (torch.func.jvp, jacfwd); use backward, torch.func.grad or vjp"
        raise NotImplementedError(wrap(f"synchronised batch norm {limit}"))


# The functions below take and return flat tuples: the tensors of the first slice, then the tensors of the next.


class _BatchNorm(Exchanging):
    """Each slice's output, from input, weight, bias and mask."""

    @staticmethod
    def forward(exchange: Exchange, savers: list[Any], *tensors: Any) -> tuple[Tensor, ...]:  # noqa: ARG004 - below
        slices = _by_slice(tensors, 4)
        if exchange.key is None:
            exchange.forward([engine.moments(x, mask) for x, _, _, mask in slices])
        return tuple(engine.normalise(x, exchange.statistics, weight, bias) for x, weight, bias, _ in slices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004 - torch's
        ctx.exchange, ctx.savers, *tensors = inputs
        saved: list[Tensor | None] = []
        ctx.unsaved = []
        for saver, (x, weight, _, mask) in zip(ctx.savers, _by_slice(tensors, 4), strict=True):
            if saver is None:
                saved += x, weight, mask
            ctx.unsaved.append(None if saver is None else (x if saver is UNSAVED else None, weight, mask))
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors: list[Tensor | None] = []
        saved = iter(ctx.saved_tensors)
        for grad, saver, unsaved in zip(grads, ctx.savers, ctx.unsaved, strict=True):
            x, weight, mask = unsaved or (next(saved), next(saved), next(saved))
            if saver not in {None, UNSAVED}:
                x, _ = saver()
            tensors += grad, x, weight, mask
        backward_pass = _BackwardPass(ctx.exchange, [needs[:3] for needs in _by_slice(ctx.needs_input_grad[2:], 4)])
        # Only `create_graph=True` needs a node, for a second derivative.
        run = partial(apply_function, _Backward) if torch.is_grad_enabled() else _Backward.forward
        gradients = _by_slice(_run_pass(ctx.exchange, run, (backward_pass, *tensors)), 3)
        return None, None, *chain.from_iterable((*of_slice, None) for of_slice in gradients)


def _run_pass(exchange: Exchange, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Sequence[Any]:
    """Compute a part of the backward pass in the replicas' streams; errors of rounds show the user's frames only."""
    try:
        return _run_in_streams(exchange.streams, run, arguments) if exchange.streams else run(*arguments)
    except StatsdBNError as error:
        hide_internal_frames(error, for_caller=True)
        raise


@dataclass(slots=True)
class _BackwardPass:
    """One backward pass of a call, with the results that a second derivative needs."""

    exchange: Exchange
    needs: list[Sequence[bool]]  # of each slice: whether input, weight and bias need gradients
    local: list[Tensor] = field(default_factory=list)  # Σdy and Σdy·(x-mean) of each local replica, shape (2, C)
    total: Tensor | None = None  # their sums over all replicas; None if no input needs a gradient


class _Backward(Exchanging):
    """Each slice's gradients of input, weight and bias, from the output's gradient, input, weight and mask."""

    @staticmethod
    def forward(backward_pass: _BackwardPass, *tensors: Any) -> tuple[Tensor | None, ...]:
        exchange, needs = backward_pass.exchange, backward_pass.needs
        statistics = exchange.statistics
        slices = [
            (*engine.prepare_backward(grad, x, mask), weight, mask) for grad, x, weight, mask in _by_slice(tensors, 4)
        ]
        backward_pass.local = [engine.backward_sums(grad, x, statistics, mask) for grad, x, _, mask in slices]
        # Only the inputs' gradients need the other replicas; parameters keep their local sums, as under DDP.
        total = None
        if any(needs_input for needs_input, _, _ in needs):
            backward_pass.total = total = exchange.backward(BACKWARD, backward_pass.local)
        gradients: list[Tensor | None] = []
        for (grad, x, weight, mask), sums, of in zip(slices, backward_pass.local, needs, strict=True):
            gradients.append(None if total is None else engine.input_gradient(grad, x, statistics, total, weight, mask))
            gradients += engine.parameter_gradients(sums, statistics, x, of[1:])
        return tuple(gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:  # noqa: ARG004
        ctx.backward_pass, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        slices = zip(_by_slice(ctx.saved_tensors, 4), _by_slice(gradients, 3), strict=True)
        arguments = ctx.backward_pass, *chain.from_iterable((*saved, *of_results) for saved, of_results in slices)
        return None, *_run_pass(ctx.backward_pass.exchange, _SecondBackward.apply, arguments)


class _SecondBackward(Exchanging):
    """Gradients of `_Backward`'s arguments, from each slice's arguments and the gradients of its results."""

    @staticmethod
    def forward(backward_pass: _BackwardPass, *tensors: Any) -> tuple[Tensor | None, ...]:
        exchange, first = backward_pass.exchange, backward_pass.total
        slices = [
            engine.SecondOrder(exchange.statistics.beside(x), sums, grad, x, *others)
            for sums, (grad, x, *others) in zip(backward_pass.local, _by_slice(tensors, 7), strict=True)
        ]
        if first is None:
            return tuple(chain.from_iterable((slice_.without_input(), None, None, None) for slice_ in slices))
        local = [slice_.sums() for slice_ in slices]
        second = exchange.backward(SECOND_BACKWARD, local)
        gradients = [slice_.gradients(first, second, sums) for slice_, sums in zip(slices, local, strict=True)]
        return tuple(chain.from_iterable((*of_slice, None) for of_slice in gradients))

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
                gradients = apply_function(_Backward, _BackwardPass(exchange, [needs]), grad, x, weight, None)
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise
        return None, *gradients


# (exchange, input, weight, bias) -> output, for a plain call; see `apply_function`.
plain_batch_norm: Any = super(torch.autograd.Function, _PlainBatchNorm).apply  # defined in C


def _by_slice(values: Any, size: int) -> list[Any]:
    """The values in groups of `size`, one group for each slice."""
    return [values[start : start + size] for start in range(0, len(values), size)]


# CUDA streams: one thread runs the batch norm of all replicas of a process. It uses the stream in which a replica's own
# thread computed the input: in another stream it could read the input too early.


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

    Autograd passes gradients in its thread's current streams, and expects the results there.
    """
    # If replicas share a device, the stream entered last is current there, as in the forward pass.
    latest = {stream.device: stream for stream in streams}
    own = {device: torch.cuda.current_stream(device) for device in latest}
    others = {device: stream for device, stream in latest.items() if stream != own[device]}
    _pass_on(arguments, own, others)
    with in_streams(others.values()):
        results: Sequence[Any] = run(*arguments)
    _pass_on(results, others, {device: own[device] for device in others})
    return results


def _pass_on(values: Iterable[Any], sources: Mapping[torch.device, Any], targets: Mapping[torch.device, Any]) -> None:
    """On each device of `targets`, let the target stream use tensors that the source stream has computed."""
    for device, target in targets.items():
        target.wait_stream(sources[device])
    for value in values:
        if isinstance(value, Tensor) and value.device in targets:
            # Otherwise the allocator could reuse the memory before the other stream has read it.
            value.record_stream(targets[value.device])
