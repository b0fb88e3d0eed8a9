"""Plain forwards: the whole way of a call where a subclass's own `forward` begins plainly.

    BatchNormAct2d                        its forward counts, reads tensors, and calls F.batch_norm
    SynchronizedBatchNormAct2d            has the `forward` that is made here, which runs a copy of that one

Nobody need look on before the copy comes to `F.batch_norm`. So its interception waits until then, and is put on torch's
stack of modes only behind that call, for what follows it. What must be asked before each call is asked in one place,
since another function takes 0.7 µs between other work; where anything is not as it usually is, the call goes the way of
all other forwards.
"""

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.compiler import is_compiling

from client.autograd.checkpointing import OUTSIDE, graph_task
from client.layers.interception import Interception
from client.layers.shortcut.copied_forward import BATCH_NORM, FUNCTIONAL, Functional, copied
from client.layers.shortcut.plain_beginning import globals_of_plain

_MISSING = object()

# What compiles the frames of this thread that begin now, or None: torch.compile may have been told to leave out
# `forward`, and not the copy that `forward` calls. It has no public name; a torch without it has no plain forwards.
_frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001
compiler: Any = getattr(_frames, "get_eval_frame_callback", None)

_waiting: dict[int, Interception | None] = {}
"""By thread: the interception of the copy that runs, until that calls `batch_norm`."""


class _PlainFunctional(Functional):
    """`torch.nn.functional` behind a plain beginning, whose interception begins behind the first call."""

    __slots__ = ()

    @staticmethod
    def batch_norm(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        mode = _waiting.get(thread)
        if mode is None:
            return FUNCTIONAL.batch_norm(*args, **kwargs)
        _waiting[thread] = None
        try:
            if F.batch_norm is BATCH_NORM:
                return mode.take(BATCH_NORM, *args, **kwargs)
        finally:
            mode.begin()
        return F.batch_norm(*args, **kwargs)


_PLAIN_FUNCTIONAL = _PlainFunctional()


def plain_forward(kind: type[nn.Module], original: type[nn.Module], adopted: Any) -> Callable[..., Any] | None:
    """The `forward` of the class that is made of one whose `forward` begins plainly; None if it does not.

    Args:
        kind: `original`, or the first class that it derives from with a `forward`.
        original: the class that is adopted.
        adopted: the class that is put before it, with the usual way of a call.
    """
    own: Any = vars(kind).get("forward")
    copy = None if compiler is None else copied(own, _PLAIN_FUNCTIONAL)
    names = None if copy is None else globals_of_plain(copy, original, _PLAIN_FUNCTIONAL)
    if copy is None or names is None:
        return None
    meanings = {name: own.__globals__.get(name, _MISSING) for name in names}
    for name, meaning in meanings.items():
        if meaning is not _MISSING:  # else a builtin
            copy.__globals__[name] = _PLAIN_FUNCTIONAL if meaning is F else meaning
    forward: Callable[..., Any] = _forward(copy, original, tuple(meanings.items()), adopted)
    return forward


def _forward(copy: FunctionType, original: Any, meanings: Sequence[tuple[str, Any]], adopted: Any) -> Any:
    own = original.forward
    globals_, code, defaults, of_keywords = own.__globals__, own.__code__, own.__defaults__, own.__kwdefaults__

    # Looked for once, and not in each layer: with attributes of modules Python takes its time.
    usual, normalise = adopted.forward, adopted._normalise_plainly  # noqa: SLF001 - of an adopted class

    @functools.wraps(usual)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        attributes = layer.__dict__
        is_unusual = (
            # A class that derives from the adopted one may compute what is read of the layer, as of a parametrization.
            "converted_from" not in type(layer).__dict__
            or is_compiling()
            or compiler() is not None
            or not attributes.get("training")
            or "_tally" in attributes
            or "_deferred" in attributes
            or "_has_come" in attributes
            or graph_task() != OUTSIDE  # `is_inside_backward`, which is one call more
            or original.forward is not own
            or own.__code__ is not code
            or own.__defaults__ is not defaults
            or own.__kwdefaults__ is not of_keywords
        )
        for name, meaning in meanings:
            is_unusual = is_unusual or globals_.get(name, _MISSING) is not meaning
        if is_unusual:
            return usual(layer, *args, **kwargs)
        interception = Interception(layer, normalise, None, _CODE)
        thread = get_ident()
        outer = _waiting.get(thread)  # a hook may run another layer before it comes to `batch_norm`
        _waiting[thread] = interception
        try:
            output = copy(layer, *args, **kwargs)
        finally:
            _waiting[thread] = outer  # no call, behind which Ctrl-C could keep `end` from running
            interception.end()
        is_plain = not (interception.nr_passed_by or interception.nr_without_tensors or "_has_come" in attributes)
        if is_plain and interception.is_reached:
            return output
        return layer._ended(interception, output, (*args, *kwargs.values()))  # noqa: SLF001 - as above

    return forward


_CODE = next(each for each in _forward.__code__.co_consts if isinstance(each, CodeType) and each.co_name == "forward")
