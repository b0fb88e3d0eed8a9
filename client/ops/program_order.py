"""Rounds in the program's order, in the code that inductor makes.

Inductor orders the operators of independent branches by the memory they need, and so by the size of the batch: members
with other shapes would then wait for each other in different layers. An operator registered as an ordered effect is
tied to the one before it as far as the graph goes. But torch 2.13 writes down the tie between their kernels under the
name of a buffer and looks for it under that of an operation, so the scheduler never sees it (`with_effects` in
`torch/_inductor/lowering.py`). Torch's own `EffectfulKernel` says by itself what it reads, and so keeps its place; the
lowering here makes one for each of our operators.

Considered and not done: a tensor handed from layer to layer, which a checkpoint inside a compiled model refuses; and
turning the reordering off, which is a setting of the user's whole program.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch._ops import OpOverload


def keep(operators: Iterable[OpOverload]) -> None:
    """Makes inductor run these operators, which are ordered effects, in the order of the graph.

    To be called while a graph is traced: inductor, if it is to compile it, has been imported by then, and is too slow
    to import for nothing.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(lowering, "lowerings", None)  # missing while another thread imports it
    if lowerings is None:
        return
    for operator in operators:
        if operator not in lowerings:
            _register(operator)


def _register(operator: OpOverload) -> None:
    from torch._inductor.lowering import register_lowering  # noqa: PLC0415 - takes seconds to import

    @register_lowering(operator, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        return _lower(operator, *args, **kwargs)


def _lower(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    from torch._higher_order_ops.effects import _get_effect  # noqa: PLC0415 - with inductor's
    from torch._inductor import ir  # noqa: PLC0415 - takes seconds to import
    from torch._inductor.virtualized import V  # noqa: PLC0415 - takes seconds to import
    from torch.utils import _pytree as pytree  # noqa: PLC0415 - with inductor's

    def boxed(value: Any) -> Any:
        return ir.TensorBox.create(value) if isinstance(value, ir.IRNode) else value

    effect: Any = _get_effect(operator)
    previous = V.graph.effectful_ops.get(effect)
    made = pytree.tree_map(boxed, ir.EffectfulKernel.create(operator, *args, **kwargs))
    # The caller writes down its own tie and who is the newest; it must not find this kernel as its own predecessor.
    V.graph.effectful_ops.pop(effect, None)
    if previous is not None:
        V.graph.effectful_ops[effect] = previous
    return made
