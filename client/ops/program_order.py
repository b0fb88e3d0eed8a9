"""Program order of rounds in the code that inductor generates.

Inductor orders independent operators by their memory use, which depends on the batch size: members with different
shapes would wait for each other in different layers. Ordered effects are dependencies between operators, but torch 2.13
stores a dependency under a buffer's name and looks it up under an operation's (`with_effects` in
`torch/_inductor/lowering.py`). torch's `EffectfulKernel` declares its dependencies itself, so inductor keeps its place.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch._ops import OpOverload


def keep(operators: Iterable[OpOverload]) -> None:
    """Makes inductor run these operators, which are ordered effects, in the order of the graph.

    Call it while a graph is traced: by then inductor has been imported if it is used. Its import takes seconds.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(lowering, "lowerings", None)  # missing while another thread imports it
    if lowerings is None:
        return
    for operator in operators:
        if operator not in lowerings:
            _register(operator)


def _register(operator: OpOverload) -> None:
    from torch._higher_order_ops.effects import _get_effect  # noqa: PLC0415 - with inductor's
    from torch._inductor import ir  # noqa: PLC0415 - takes seconds to import
    from torch._inductor.lowering import register_lowering  # noqa: PLC0415 - as above
    from torch._inductor.virtualized import V  # noqa: PLC0415 - as above
    from torch.utils import _pytree as pytree  # noqa: PLC0415 - with inductor's

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
