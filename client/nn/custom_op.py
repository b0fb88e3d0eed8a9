"""The layer as torch.compile traces it: its arithmetic, which inductor fuses with what is around it, and its rounds.

A round is an operator that takes and returns tensors and plain values only, so the compiler keeps it whole, in the
program's order. What a forward round leaves for the backward one travels as two small tensors: the statistics, where
the vectors of the input are, and a ticket, on the host.

All ranks make the same bits of a round, compiled or not, since the operator computes what they share: the compiler sees
only what the slice brings, and what is done to the slice.
"""

from math import prod
from typing import Any, List  # noqa: UP035 - torch 2.6 reads no other lists of an operator's arguments

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd.function import once_differentiable

from client.diagnostics import collectives
from client.nn import running_stats
from client.nn.micro_batches import Deferred, numbered
from client.ops import engine, program_order
from client.ops.checkpointing import exchange_cache, is_inside_backward
from client.ops.exchange import BackwardPasses, Exchange, backward_round, phase_of, phase_of_forward
from client.ops.functional import Exchanging, apply_function
from client.ops.reference import Traced, affine_vectors, apply_affine, gradient_vectors
from client.ops.statistics import ChannelMoments, ChannelStatistics, compute_type, to_float64
from client.session import groups
from client.session.groups import LOCAL, Group
from client.tracebacks import hide_internal_frames
from client.transports import device_rows
from client.transports.choose import GroupSpec, transport_for
from client.transports.device_rows import Count, LocalRows
from client.transports.in_process import LocalPipe
from client.transports.named_process_group import NamedProcessGroup
from client.transports.process_group import ProcessGroupPipe
from client.transports.transport import Transport
from statsd_bn.errors import StatsdBNError
from statsd_bn.round_key import BACKWARD, FORWARD

# Rows of the statistics: those of `ChannelStatistics`, what the running statistics move towards, and if they do. One
# number fills its row.
COUNT, MEAN, INVSTD, SLOPE, NEWEST_COUNT, NEWEST_MEAN, NEWEST_VARIANCE, IS_DUE = range(8)
ROWS = 8

# Of the vectors that an operator returns for `reference.apply_affine`.
VECTORS = 3

# Entries of the ticket: the round's step and call, and the exchange's number.
TICKET = 3

Shape = List[int]  # noqa: UP006 - as above

# In place of a `Deferred`'s number: each call moves the running statistics.
NOT_DEFERRED = 0

# The name and size of a group that sends nothing, for eval: of this process. No group that somebody names is called so.
THIS_PROCESS = (f"{LOCAL} process", 1)

_backward_passes = BackwardPasses()


def named(group: GroupSpec) -> tuple[str, int]:
    """Returns a layer's group as plain values, name and size.

    ("", 0) stands for None, the rule's name and 0 for a rule. A process
    group's size is counted down from -1.
    """
    if isinstance(group, NamedProcessGroup):
        return group.name, -1 - group.size
    if isinstance(group, Group):
        return group.name, group.size
    return group or "", 0


def transport_of(layer: str, group: str, size: int) -> Transport:
    """Returns the transport of a layer whose group is written as `named` does it, or as `THIS_PROCESS`."""
    if (group, size) == THIS_PROCESS:
        return LocalPipe(layer)
    if size < 0:
        return ProcessGroupPipe(NamedProcessGroup(group, -1 - size), layer)
    return transport_for(layer, groups.named(group, size) if size else group or None)


def forward(layer: Any, x: Tensor, mask: Tensor | None, deferred: Deferred | None) -> Tensor:
    """Normalises `x` by the operators, and moves the running statistics by what they return.

    Args:
        layer: a `SynchronizedBatchNorm`.
        x: shape (N, C, *).
        mask: shape (N, *), bool, or None.
        deferred: says when the running statistics move; None after each call.
    """
    output: Tensor
    transport = named(layer.group) if layer.training else THIS_PROCESS
    number = NOT_DEFERRED if deferred is None else deferred.number
    output, statistics = torch.ops.statsd_bn.batch_norm(
        x,
        layer.weight,
        layer.bias,
        mask,
        layer.layer_name,
        *transport,
        layer.eps,
        layer.eps_mode,
        number,
        phase_of_forward(needs_gradient=x.requires_grad),
    )
    if layer.training:
        running_stats.move(
            layer,
            statistics[NEWEST_MEAN],
            statistics[NEWEST_VARIANCE],
            is_due=statistics[IS_DUE, 0].long(),
            has_values=statistics[NEWEST_COUNT, 0] > 0,
        )
    return output


@torch.library.custom_op("statsd_bn::exchange", mutates_args=())
def exchange(
    sums: Tensor,
    counted: Tensor | None,
    shape: Shape,
    layer: str,
    group: str,
    size: int,
    eps: float,
    eps_mode: str,
    deferred: int,
    phase: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the forward round of this process's slice.

    Args:
        sums: shape (2, C), float64: Σx and Σx².
        counted: shape (), float64: how many positions count; None for all.
        shape: of the slice.
        layer: the layer's name.
        group: with whom it synchronises, as `named` writes it; or `THIS_PROCESS`.
        size: of that group.
        eps: the layer's.
        eps_mode: the layer's.
        deferred: the number of the layer's `Deferred`.
        phase: of the round.
        dtype: in which the slice is normalised.

    Returns:
        The vectors that normalise the slice, shape (3, C), in that type, see `reference.apply_affine`; the statistics,
        shape (8, C), float64; the ticket, shape (3,), int64, on the host. Constants name rows and entries.
    """
    transport = transport_of(layer, group, size)
    capacity = device_rows.capacity_of(transport, [sums], phase) if device_rows.may_stay(transport, sums) else 0
    fresh = Exchange(transport, layer, eps, eps_mode, phase, capacity)
    try:
        found = _exchanged(ChannelMoments(_count(counted, shape), sums[0], sums[1], tuple(shape)), fresh)
    except StatsdBNError as error:
        hide_internal_frames(error)
        raise
    assert found.key is not None  # noqa: S101 - the forward round has set it
    due = _due_after(found.moments, deferred) if found is fresh else None
    statistics = found.statistics.on(sums.device)
    ticket = torch.tensor((found.key.step, found.key.call, found.number), device="cpu")
    vectors = affine_vectors(statistics, statistics.invstd, torch.zeros_like(statistics.mean), dtype)
    return vectors, _written(statistics, due), ticket


def _count(counted: Tensor | None, shape: Shape) -> Count:
    return prod(shape) // shape[1] if counted is None else counted


def _written(found: ChannelStatistics, due: ChannelMoments | None) -> Tensor:
    mean = found.mean
    if due is None:
        newest = [torch.zeros_like(mean)] * 4
    else:
        due = due.on(mean.device)
        has_ended_well = torch.ones_like(mean) if isinstance(due.count, int) else (~due.count.isnan()).double()
        newest = [_row(mean, due.count), *running_stats.newest(due), _row(mean, has_ended_well)]
    return torch.stack((_row(mean, found.count), mean, found.invstd, found.slope, *newest))


def _row(like: Tensor, number: Count) -> Tensor:
    return torch.full_like(like, number) if isinstance(number, int) else number.expand_as(like)


def _due_after(moments: ChannelMoments, deferred: int) -> ChannelMoments | None:
    """Returns what the running statistics move by after a call with these moments; None if they do not move."""
    return moments if deferred == NOT_DEFERRED else numbered(deferred).add(moments)


def _exchanged(local: ChannelMoments, fresh: Exchange) -> Exchange:
    """Returns an exchange that has had its forward round; an earlier one if a checkpoint computes again."""
    if is_inside_backward() and (earlier := exchange_cache.find(fresh.layer, fresh.transport, 0, local)):
        return earlier
    fresh.forward([local])
    fresh.check_count(local.shape)
    collectives.remember()
    exchange_cache.add(fresh, has_graph=False)  # the graph has the ticket instead
    return fresh


@torch.library.custom_op("statsd_bn::exchange_backward", mutates_args=())
def exchange_backward(
    sums: Tensor,
    counted: Tensor | None,
    shape: Shape,
    statistics: Tensor,
    ticket: Tensor,
    layer: str,
    group: str,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Runs the backward round of this process's slice.

    Its sums, shape (2, C), float64, are Σdy and Σdy·(x - mean); all other arguments `exchange` was given or has
    returned. It returns the vectors of the gradient through the statistics, shape (3, C), see
    `reference.gradient_vectors`.
    """
    transport = transport_of(layer, group, size)
    step, call, number = ticket.tolist()
    key = transport.key(step, call, phase_of(BACKWARD, _backward_passes.count(number)))
    rows = LocalRows.of([_count(counted, shape)], [sums])
    capacity = device_rows.capacity_of(transport, [sums]) if device_rows.stay(transport, [sums]) else 0
    total = backward_round(transport, rows, capacity, key)
    found = _read(statistics)
    return gradient_vectors(found, engine.means_of(total, found), dtype)


def _read(statistics: Tensor) -> ChannelStatistics:
    return ChannelStatistics(statistics[COUNT, 0], statistics[MEAN], statistics[INVSTD], statistics[SLOPE])


ROUNDS = exchange._opoverload, exchange_backward._opoverload  # noqa: SLF001 - the operators behind custom_op


@exchange.register_fake
def _(sums: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    program_order.keep(ROUNDS)
    *_, dtype = others
    channels = sums.shape[1]
    ticket = torch.empty(TICKET, dtype=torch.int64, device="cpu")
    return sums.new_empty(VECTORS, channels, dtype=dtype), sums.new_empty(ROWS, channels), ticket


@exchange_backward.register_fake
def _(sums: Tensor, *others: Any) -> Tensor:
    program_order.keep(ROUNDS)
    *_, dtype = others
    return sums.new_empty(VECTORS, sums.shape[1], dtype=dtype)


# Rounds are an effect: the compiler must neither drop nor repeat nor reorder them, or members that were compiled for
# other shapes would wait for each other in different layers.
for _operator in ROUNDS:
    _register_effectful_op(_operator, _EffectType.ORDERED)


class _BatchNorm(Exchanging):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, *others: Any
    ) -> tuple[Tensor, ...]:
        moments = Traced(mask).moments(x)
        found = exchange(moments.vectors, _counted(x, mask), x.shape, *others, compute_type(x))
        return apply_affine(x, found[0], weight, bias).to(x.dtype), *found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, mask, *ctx.transport, _, _, _, _ = inputs
        _, *found = output
        ctx.mark_non_differentiable(*found)
        ctx.save_for_backward(x, weight, mask, *found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask, vectors, statistics, ticket = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        found, traced, dtype = _read(statistics), Traced(mask), compute_type(x)
        # Inductor leaves out the rounding of what is rounded and made wide again: so the operator rounds the mean.
        sums = traced.sums_around(vectors[0], found.mean - vectors[0].double(), grad, x)
        by_input = None
        if needs_input:
            ours = statistics, ticket, *ctx.transport
            through_statistics = exchange_backward(sums, _counted(x, mask), x.shape, *ours, dtype)
            by_input = traced.gradient(grad, x, vectors[1], through_statistics, weight)
        by_weight, by_bias = (engine.to_parameter(each, x) for each in engine.parameter_gradients(sums, found))
        return by_input, by_weight if needs_weight else None, by_bias if needs_bias else None, *[None] * 8


def _counted(x: Tensor, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else to_float64(x, mask.sum())[0]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    layer: str,
    group: str,
    size: int,
    eps: float,
    eps_mode: str,
    deferred: int = NOT_DEFERRED,
    phase: str = FORWARD,
) -> tuple[Tensor, Tensor]:
    """Normalises this process's slice with the statistics of the whole batch.

    It takes the input, shape (N, C, *), weight, bias and mask as `forward` does, and the arguments of `exchange`. It
    returns the output, and the statistics as `exchange` does.
    """
    engine.check_parameter("weight", weight, x)
    engine.check_parameter("bias", bias, x)
    others = layer, group, size, eps, eps_mode, deferred, phase
    try:
        output, _, statistics, _ = apply_function(_BatchNorm, x, weight, bias, mask, *others)
    except StatsdBNError as error:
        hide_internal_frames(error)
        raise
    return output, statistics


# One operator for dynamo, which would trace the code above line by line; what comes after dynamo looks into it.
_library: Any = torch.library.Library("statsd_bn", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"batch_norm{torch.library.infer_schema(batch_norm, mutates_args=())}")
_library.impl("batch_norm", batch_norm, "CompositeImplicitAutograd")
