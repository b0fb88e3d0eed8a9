"""Operators that compute a layer under torch.compile.

Inductor fuses a slice's own moments and its normalisation with adjacent operations. A round is one operator on
tensors and plain values: the compiler keeps it whole and in program order. The operator computes everything that the
ranks share, so all ranks have the same bits, compiled or not.
"""

import sys
from math import prod
from typing import Any, List  # noqa: UP035 - torch 2.6 accepts no other list type in an operator's signature

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable

from client.diagnostics import collectives
from client.nn import running_stats
from client.nn.running_stats import DeferredUpdate, deferred_updates
from client.ops import engine
from client.ops.checkpointing import exchange_cache, is_inside_backward
from client.ops.exchange import Exchange, backward_round, count_backward_pass, phase_of, phase_of_forward
from client.ops.functional import Exchanging, apply_function
from client.ops.reference import Traced, affine_vectors, apply_affine, gradient_vectors
from client.ops.statistics import ChannelMoments, ChannelStatistics, compute_type, to_float64
from client.session import groups
from client.session.groups import LOCAL, Group
from client.tracebacks import api_boundary
from client.transports import device_rows
from client.transports.choose import GroupSpec, transport_for
from client.transports.device_rows import Count, LocalRows
from client.transports.process_group import NamedProcessGroup, ProcessGroupPipe
from client.transports.transport import LocalPipe, Transport
from statsd_bn.round_key import BACKWARD, FORWARD

# Rows of the statistics: four for `ChannelStatistics`, three for the running statistics, and whether these are updated.
# A scalar fills its row.
COUNT, STATISTICS = 0, slice(1, 4)
NEWEST_COUNT, NEWEST_MEAN, NEWEST_VARIANCE, IS_DUE = range(4, 8)

Shape = List[int]  # noqa: UP006 - as above

NOT_DEFERRED = 0  # in place of the number of a `DeferredUpdate`: each call updates the running statistics
THIS_PROCESS = (f"{LOCAL} process", 1)  # group of this process alone, for eval; users' groups cannot have this name


def encode_group(group: GroupSpec) -> tuple[str, int]:
    """Return a layer's group as name and size; a process group of n ranks has the size -1 - n."""
    if isinstance(group, NamedProcessGroup):
        return group.name, -1 - group.size
    if isinstance(group, Group):
        return group.name, group.size
    return group or "", 0


def transport_of(layer: str, group: str, size: int) -> Transport:
    """Return the transport of a layer in an encoded group."""
    if (group, size) == THIS_PROCESS:
        return LocalPipe(layer)
    if size < 0:
        return ProcessGroupPipe(NamedProcessGroup(group, -1 - size), layer)
    return transport_for(layer, groups.group_named(group, size) if size else group or None)


def forward(layer: Any, x: Tensor, mask: Tensor | None, deferred: DeferredUpdate | None) -> Tensor:
    """Normalise `x` by the operators, and update the running statistics with the result."""
    output: Tensor
    group = encode_group(layer.group) if layer.training else THIS_PROCESS
    of_layer = layer.layer_name, *group, layer.eps, layer.eps_mode
    number = NOT_DEFERRED if deferred is None else deferred.number
    phase = phase_of_forward(needs_gradient=x.requires_grad)
    output, statistics = torch.ops.statsd_bn.batch_norm(x, layer.weight, layer.bias, mask, *of_layer, number, phase)
    if layer.training:
        is_due, has_values = statistics[IS_DUE, 0].long(), statistics[NEWEST_COUNT, 0] > 0
        newest = statistics[NEWEST_MEAN], statistics[NEWEST_VARIANCE]
        running_stats.update(layer, *newest, is_due=is_due, has_values=has_values)
    return output


@torch.library.custom_op("statsd_bn::exchange", mutates_args=())
@api_boundary
def exchange(
    sums: Tensor,
    masked_count: Tensor | None,
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
    """Run the forward round of this process's slice, with its sums, shape (2, C), float64: Σx and Σx².

    Returns the vectors of `reference.apply_affine`, shape (3, C), in `dtype`; the statistics, shape (8, C), float64;
    the round's id, shape (3,), int64, on the host: step, call, and number of the exchange.
    """
    transport = transport_of(layer, group, size)
    capacity = device_rows.device_capacity(transport, [sums], phase)
    fresh = Exchange(transport, layer, eps, eps_mode, phase, capacity)
    local = ChannelMoments(_count(masked_count, shape), sums, tuple(shape))
    # If a checkpoint recomputes the call, the exchange of its first run has the results.
    done = (exchange_cache.find(layer, transport, 0, local) if is_inside_backward() else None) or fresh
    due = None
    if done is fresh:
        fresh.forward([local])
        collectives.record_ddp_wrapper()
        exchange_cache.add(fresh, has_graph=False)  # a compiled graph keeps only the round's id
        due = fresh.moments if deferred == NOT_DEFERRED else deferred_updates[deferred].add(fresh.moments)
    assert done.key is not None  # noqa: S101 - the forward round has set it
    statistics = done.statistics.beside(sums)
    round_id = torch.tensor((done.key.step, done.key.call, done.number), device="cpu")
    vectors = affine_vectors(statistics, statistics.invstd, torch.zeros_like(statistics.mean), dtype)
    return vectors, _pack(statistics, due), round_id


def _count(masked_count: Tensor | None, shape: Shape) -> Count:
    return prod(shape) // shape[1] if masked_count is None else masked_count


def _pack(statistics: ChannelStatistics, due: ChannelMoments | None) -> Tensor:
    mean = statistics.mean
    if due is None:
        newest = [torch.zeros_like(mean)] * 4
    else:
        due = due.beside(mean)
        has_succeeded = torch.ones_like(mean) if isinstance(due.count, int) else (~due.count.isnan()).double()
        statistics_due = due.mean(), due.variance(unbiased=True)
        newest = [_row(mean, due.count), *statistics_due, _row(mean, has_succeeded)]
    return torch.stack((_row(mean, statistics.count), *statistics.vectors, *newest))


def _row(like: Tensor, number: Count) -> Tensor:
    return torch.full_like(like, number) if isinstance(number, int) else number.expand_as(like)


def _unpack(statistics: Tensor) -> ChannelStatistics:
    return ChannelStatistics(statistics[COUNT, 0], statistics[STATISTICS])


@torch.library.custom_op("statsd_bn::exchange_backward", mutates_args=())
def exchange_backward(
    sums: Tensor,
    masked_count: Tensor | None,
    shape: Shape,
    statistics: Tensor,
    round_id: Tensor,
    layer: str,
    group: str,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Run the backward round of this process's slice, with its sums, shape (2, C): Σdy and Σdy·(x - mean).

    Returns the vectors of `reference.gradient_vectors`, shape (3, C), in `dtype`.
    """
    transport = transport_of(layer, group, size)
    step, call, number = round_id.tolist()
    key = transport.key(step, call, phase_of(BACKWARD, count_backward_pass(number)))
    rows = LocalRows.of([_count(masked_count, shape)], [sums])
    capacity = device_rows.device_capacity(transport, [sums], agree=False)
    total = backward_round(transport, rows, capacity, key)
    of_forward = _unpack(statistics)
    return gradient_vectors(of_forward, engine.means_of(total, of_forward), dtype)


def keep_program_order() -> None:
    """Make inductor run the rounds, which are ordered effects, in the order of the graph.

    Inductor orders independent operators by their memory use, which depends on the batch size: members with different
    shapes would wait for each other in different layers. Ordered effects are dependencies between operators, but torch
    2.13 stores a dependency under a buffer's name and looks it up under an operation's name (`with_effects` in
    `torch/_inductor/lowering.py`). So rounds are lowered to torch's `EffectfulKernel`, which declares its dependencies
    itself. This function runs while a graph is traced: if inductor is used, its slow import has happened by then.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(lowering, "lowerings", None)  # missing while another thread imports it
    if lowerings is None:
        return
    for operator in ROUNDS:
        if operator not in lowerings:
            _register_lowering(operator)


def _register_lowering(operator: OpOverload) -> None:
    from torch._higher_order_ops.effects import _get_effect  # noqa: PLC0415 - used with inductor only
    from torch._inductor import ir  # noqa: PLC0415 - takes seconds to import
    from torch._inductor.lowering import register_lowering  # noqa: PLC0415 - as above
    from torch._inductor.virtualized import V  # noqa: PLC0415 - as above
    from torch.utils import _pytree as pytree  # noqa: PLC0415 - used with inductor only

    def boxed(value: Any) -> Any:
        return ir.TensorBox.create(value) if isinstance(value, ir.IRNode) else value

    @register_lowering(operator, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        effect: Any = _get_effect(operator)
        previous = V.graph.effectful_ops.get(effect)
        made = pytree.tree_map(boxed, ir.EffectfulKernel.create(operator, *args, **kwargs))
        # The caller records this kernel itself. Restore the former entry, or the kernel would depend on itself.
        V.graph.effectful_ops.pop(effect, None)
        if previous is not None:
            V.graph.effectful_ops[effect] = previous
        return made


ROUNDS = exchange._opoverload, exchange_backward._opoverload  # noqa: SLF001 - the operators behind custom_op


@exchange.register_fake
def _(sums: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    keep_program_order()
    channels = sums.shape[1]
    round_id = torch.empty(3, dtype=torch.int64, device="cpu")
    return sums.new_empty(3, channels, dtype=others[-1]), sums.new_empty(8, channels), round_id


@exchange_backward.register_fake
def _(sums: Tensor, *others: Any) -> Tensor:
    keep_program_order()
    return sums.new_empty(3, sums.shape[1], dtype=others[-1])


# Rounds are effects, which the compiler must not drop, repeat or reorder: otherwise members whose graphs were compiled
# for different shapes could wait for each other in different layers.
for _operator in ROUNDS:
    _register_effectful_op(_operator, _EffectType.ORDERED)


class _BatchNorm(Exchanging):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, *others: Any
    ) -> tuple[Tensor, ...]:
        moments = Traced(mask).moments(x)
        results = exchange(moments.vectors, _masked_count(x, mask), x.shape, *others, compute_type(x))
        return apply_affine(x, results[0], weight, bias).to(x.dtype), *results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, mask, *ctx.layer_and_group, _, _, _, _ = inputs
        _, *results = output
        ctx.mark_non_differentiable(*results)
        ctx.save_for_backward(x, weight, mask, *results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask, vectors, packed, round_id = ctx.saved_tensors
        needs_input, *needs_parameters = ctx.needs_input_grad[:3]
        statistics, traced, dtype = _unpack(packed), Traced(mask), compute_type(x)
        # `vectors[0]` is the mean, rounded in `exchange`: here inductor would drop a conversion to float32 and back.
        sums = traced.sums_around(vectors[0], statistics.mean - vectors[0].double(), grad, x)
        by_input = None
        if needs_input:
            arguments = packed, round_id, *ctx.layer_and_group, dtype
            through_statistics = exchange_backward(sums, _masked_count(x, mask), x.shape, *arguments)
            by_input = traced.gradient(grad, x, vectors[1], through_statistics, weight)
        return by_input, *engine.parameter_gradients(sums, statistics, x, needs_parameters), *[None] * 8


def _masked_count(x: Tensor, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else to_float64(x, mask.sum())[0]


@api_boundary
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
    """Normalise this process's slice, shape (N, C, *); return the output and the statistics of `exchange`."""
    engine.check_parameter("weight", weight, x)
    engine.check_parameter("bias", bias, x)
    others = layer, group, size, eps, eps_mode, deferred, phase
    output, _, statistics, _ = apply_function(_BatchNorm, x, weight, bias, mask, *others)
    return output, statistics


# One operator for dynamo: otherwise it would trace the code above line by line. AOTAutograd and inductor decompose it.
_library: Any = torch.library.Library("statsd_bn", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"batch_norm{torch.library.infer_schema(batch_norm, mutates_args=())}")
_library.impl("batch_norm", batch_norm, "CompositeImplicitAutograd")
