"""The layer as operators that torch.compile keeps whole: it sees what goes in and comes out, not the exchange.

An operator takes and returns tensors and plain values only. So what a forward round leaves for the backward one travels
as two small tensors: the statistics, where the vectors of the input are, and a ticket, on the host.
"""

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from client.autograd import program_order, rounds
from client.autograd.backward_passes import BackwardPasses, phase_of
from client.autograd.checkpointing import exchanges, is_inside_backward
from client.autograd.exchange import Exchange, phase_of_forward
from client.border import make_readable
from client.connection import groups
from client.connection.groups import LOCAL, Group
from client.layers import running_stats
from client.layers.micro_batches import Deferred, numbered
from client.ops import engine, layout, vectors
from client.ops.reference import count
from client.ops.statistics import ChannelMoments, ChannelStatistics, Count
from client.transports import device_rows
from client.transports.choose import With, transport_for
from client.transports.device_rows import LocalRows
from client.transports.in_process import LocalPipe
from client.transports.named_process_group import NamedProcessGroup
from client.transports.process_group import ProcessGroupPipe
from client.transports.transport import Transport
from client.whereabouts import collectives
from statsd_bn.errors import StatsdBNError
from statsd_bn.round_key import BACKWARD, FORWARD

# Rows of the statistics: those of `ChannelStatistics`, what the running statistics move towards, and if they do. One
# number fills its row.
COUNT, MEAN, INVSTD, SLOPE, NEWEST_COUNT, NEWEST_MEAN, NEWEST_VARIANCE, IS_DUE = range(8)
ROWS = 8

# Entries of the ticket: the round's step and call, and the exchange's number.
TICKET = 3

# In place of a `Deferred`'s number: each call moves the running statistics.
NOT_DEFERRED = 0

# The name and size of a group that sends nothing, for eval: of this process. No group that somebody names is called so.
THIS_PROCESS = (f"{LOCAL} process", 1)

_backward_passes = BackwardPasses()


def named(group: With) -> tuple[str, int]:
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
    """Normalises `x` by the operator, and moves the running statistics by what it returns.

    Args:
        layer: a `SynchronizedBatchNorm`.
        x: shape (N, C, *).
        mask: shape (N, *), bool, or None.
        deferred: says when the running statistics move; None after each call.
    """
    output: Tensor
    transport = named(layer.group) if layer.training else THIS_PROCESS
    number = NOT_DEFERRED if deferred is None else deferred.number
    output, statistics, _ = batch_norm(
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
        statistics = statistics.detach()
        running_stats.move(
            layer,
            statistics[NEWEST_MEAN],
            statistics[NEWEST_VARIANCE],
            is_due=statistics[IS_DUE, 0].long(),
            has_values=statistics[NEWEST_COUNT, 0] > 0,
        )
    return output


@torch.library.custom_op("statsd_bn::batch_norm", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises this process's slice with the statistics of the whole batch.

    Args:
        x: shape (N, C, *).
        weight: shape (C,) or None.
        bias: shape (C,) or None.
        mask: shape (N, *), bool, or None.
        layer: the layer's name.
        group: with whom it synchronises, as `named` writes it; or `THIS_PROCESS`.
        size: of that group.
        eps: the layer's.
        eps_mode: the layer's.
        deferred: the number of the layer's `Deferred`.
        phase: of the forward round.

    Returns:
        The output; the statistics, shape (8, C), float64, where the vectors of `x` are; the ticket, shape (3,), int64,
        on the host; their rows and entries are named above.
    """
    transport = transport_of(layer, group, size)
    capacity = device_rows.capacity_of(transport, [x], phase) if device_rows.may_stay(transport, x) else 0
    fresh = Exchange(transport, layer, eps, eps_mode, phase, capacity)
    try:
        exchange = _exchanged(x, mask, fresh)
    except StatsdBNError as error:
        make_readable(error)
        raise
    assert exchange.key is not None  # noqa: S101 - the forward round has set it
    due = _due_after(exchange.moments, deferred) if exchange is fresh else None
    output = engine.normalise(x, exchange.statistics, weight, bias)
    ticket = torch.tensor((exchange.key.step, exchange.key.call, exchange.number), device="cpu")
    return output, _written(exchange.statistics.on(vectors.home(x)), due), ticket


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


def _exchanged(x: Tensor, mask: Tensor | None, fresh: Exchange) -> Exchange:
    """Returns an exchange that has had its forward round; an earlier one if a checkpoint computes again."""
    local = engine.moments(x, mask)
    if is_inside_backward() and (earlier := exchanges.find(fresh.layer, fresh.transport, 0, local)):
        return earlier
    fresh.forward([local])
    fresh.check_count(x)
    collectives.remember()
    exchanges.remember(fresh, has_graph=False)  # the graph has the ticket instead
    return fresh


@torch.library.custom_op("statsd_bn::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    statistics: Tensor,
    ticket: Tensor,
    layer: str,
    group: str,
    size: int,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input (empty if it needs none), weight and bias; the arguments are `batch_norm`'s."""
    transport = transport_of(layer, group, size)
    found = ChannelStatistics(statistics[COUNT, 0], statistics[MEAN], statistics[INVSTD], statistics[SLOPE])
    grad, x = engine.for_backward(grad, x, mask)
    local = engine.backward_sums(grad, x, found, mask)
    by_input = x.new_empty(0)
    if needs_input:
        step, call, number = ticket.tolist()
        key = transport.key(step, call, phase_of(BACKWARD, _backward_passes.count(number)))
        rows = LocalRows.of([count(x, mask)], [local])
        capacity = device_rows.capacity_of(transport, [x]) if device_rows.stay(transport, [x]) else 0
        total = rounds.backward(transport, rows, capacity, key)
        by_input = engine.input_gradient(grad, x, found, total, weight, mask)
    by_weight, by_bias = engine.parameter_gradients(local, found)
    return by_input, engine.vector(by_weight, x), engine.vector(by_bias, x)


def _keep_whole(forward: Any, backward: Any) -> None:
    """Makes two operators one call of a layer, which torch.compile keeps whole.

    Args:
        forward: takes and returns what `batch_norm` does.
        backward: its gradients, as `batch_norm_backward` has them.
    """
    operators = forward._opoverload, backward._opoverload  # noqa: SLF001 - the operators behind custom_op

    def fake_forward(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        program_order.keep(operators)
        statistics = torch.empty(ROWS, x.shape[1], dtype=torch.float64, device=vectors.home(x))
        ticket = torch.empty(TICKET, dtype=torch.int64, device="cpu")
        return layout.laid_out(torch.empty_like(x)), statistics, ticket

    def fake_backward(_grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        program_order.keep(operators)
        *_, needs_input = others
        by_parameter = torch.empty(x.shape[1], dtype=vectors.compute_type(x), device=x.device)
        by_input = layout.laid_out(torch.empty_like(x)) if needs_input else x.new_empty(0)
        return by_input, by_parameter, torch.empty_like(by_parameter)

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        found = backward(grad, *ctx.saved_tensors, *ctx.transport, needs[0])
        return *(each if need else None for each, need in zip(found, needs, strict=True)), *[None] * 8

    forward.register_fake(fake_forward)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=_setup_context)
    # Rounds are an effect: the compiler must neither drop nor repeat nor reorder them, or members that were compiled
    # for other shapes would wait for each other in different layers.
    for operator in operators:
        _register_effectful_op(operator, _EffectType.ORDERED)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, mask, *ctx.transport, _, _, _, _ = inputs
    _, statistics, ticket = output
    ctx.save_for_backward(x, weight, mask, statistics, ticket)


_keep_whole(batch_norm, batch_norm_backward)
