"""Tracing: what torch's tracers, which cannot record an exchange, get of a layer."""

from collections.abc import Sequence
from typing import Any

from torch.compiler import is_compiling
from torch.fx import Proxy, Tracer
from torch.overrides import has_torch_function

from statsd_bn.error_text import broken


def refusal(layer: str, by: str) -> TypeError:
    """Returns the error of a tracer that a layer is not for.

    Args:
        layer: the layer's name.
        by: what it cannot be, and by which tracer.
    """
    return TypeError(
        broken(
            f"layer {layer!r}: a synchronised layer cannot be {by}; give it client.revert_model(model), which is "
            "torch's own again"
        )
    )


def leaf(layer: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Returns the `Proxy` of a call's result where torch.fx traces it; None elsewhere.

    The graph calls the layer as a module, as it calls torch's own layers.

    Args:
        layer: a `SynchronizedBatchNorm`.
        arguments: of the call.
        named: keyword arguments of the call.

    Raises:
        TypeError: the layer is the whole of what is traced, or has hooks, which would run while it is traced too.
    """
    # What is traced as a whole, and takes any arguments, gets one proxy for all of them.
    given = (arguments,) if isinstance(arguments, Proxy) else (*arguments, *named.values())
    if is_compiling() or not has_torch_function(given):
        return None
    proxies = [each for each in given if isinstance(each, Proxy)]
    if not proxies:
        return None
    tracer = proxies[0].tracer
    path = tracer.path_of_module(layer) if isinstance(tracer, Tracer) else ""
    if not path or layer._forward_hooks or layer._forward_pre_hooks:  # noqa: SLF001 - they have no public names
        raise refusal(layer.layer_name, f"traced by torch.fx {'with its hooks' if path else 'by itself'}")
    return tracer.create_proxy("call_module", path, tuple(arguments), named)
