"""Copied forwards: the `F.batch_norm` of a subclass's `forward` comes to the interception without torch's way there.

    BatchNormAct2d                        its forward calls F.batch_norm
    SynchronizedBatchNormAct2d            (Intercepted, Shortcut, BatchNormAct2d, Behind): a Shortcut is made here

Torch tells a mode of a call by `handle_torch_function`, whose Python takes 15 to 20 µs between other work. So such a
`forward` runs as a copy, in which the name `F` stands for `Functional`. Its `batch_norm` does what torch does for a
mode, and no more: it takes the innermost off the stack, calls it, and puts it back.

The copy has the code and the closure of the original, so `super()` goes where it went; it has the globals of the
original, each looked up when it is used. Where the original is changed, it runs itself. torch.compile traces it.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.compiler import is_dynamo_compiling

from client.layers import interception
from client.layers.conversion.bytecode import asks_for_attribute, instructions_of
from client.layers.interception import Interception

# The interpreter looks for these in a function's globals itself: for builtins, imports and warnings.
_INTERPRETERS = ("__builtins__", "__file__", "__loader__", "__name__", "__package__", "__spec__")

# What changes globals, asks for all of them, or looks only for those that are there, as the body of a class does: a
# copy would change, show or ask its own.
_OPERATIONS_ON_GLOBALS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})
_FUNCTIONS_OF_GLOBALS = frozenset({"eval", "exec", "globals", "vars"})


def shortcut_to(kind: type[nn.Module]) -> type | None:
    """Class to put before `kind` among the bases of an adopted one; None if its `forward` needs or allows none."""
    copy = copied(vars(kind).get("forward"))
    return None if copy is None else _shortcut(copy, _changes(kind))


def _shortcut(copy: FunctionType, is_another: Callable[[], bool]) -> type:
    class Shortcut:
        __slots__ = ()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """The original's, by the copy unless torch.compile traces it or the class has got another since."""
            if is_dynamo_compiling() or is_another():
                return super().forward(*args, **kwargs)  # type: ignore[misc]
            return copy(self, *args, **kwargs)

    return Shortcut


def _changes(kind: Any) -> Callable[[], bool]:
    """Whether a class has got another `forward` since."""
    forward = kind.forward
    code, defaults, of_keywords = forward.__code__, forward.__defaults__, forward.__kwdefaults__

    def is_another() -> bool:
        if kind.forward is not forward or forward.__code__ is not code:
            return True
        return forward.__defaults__ is not defaults or forward.__kwdefaults__ is not of_keywords

    return is_another


class Functional:
    """`torch.nn.functional`, with a `batch_norm` that looks for an interception first."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def batch_norm(*args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        function, mode = F.batch_norm, interception.innermost()
        # What a profiler has put in its place calls torch's in the end, which asks the mode.
        if function is not BATCH_NORM or not isinstance(mode, Interception):
            return function(*args, **kwargs)
        interception.pop()
        try:
            return mode.take(function, *args, **kwargs)
        finally:
            interception.push(mode)


FUNCTIONAL = Functional()


def copied(forward: Any, functional: Functional = FUNCTIONAL) -> FunctionType | None:
    """Copy of a `forward` whose own `F.batch_norm` is ours; None if it has none, or needs its globals to be its own."""
    if not isinstance(forward, FunctionType):
        return None
    names = _names_of_functional(forward)
    if not names or _needs_its_globals(forward):
        return None
    # A code of its own, because the interpreter notes in it where it has found a global.
    code, globals_ = forward.__code__.replace(), _Globals(forward.__globals__, names, functional)
    copy = FunctionType(code, globals_, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = forward.__kwdefaults__, forward.__qualname__
    return copy


class _Globals(dict[str, Any]):
    """The globals of a module as they are now, but that some names of `torch.nn.functional` mean a `Functional`."""

    __slots__ = ("_functional", "_module", "_names")

    def __init__(self, module: dict[str, Any], names: frozenset[str], functional: Functional) -> None:
        super().__init__({name: module[name] for name in _INTERPRETERS if name in module})
        self._module, self._names, self._functional = module, names, functional

    def __missing__(self, name: str) -> Any:
        value = self._module[name]
        return self._functional if value is F and name in self._names else value


def torchs_own(function: Any) -> Any:
    """The function, or None if it is not torch's: a profiler may have come before us, and is to see each call."""
    return function if getattr(function, "__globals__", None) is vars(F) else None


BATCH_NORM = torchs_own(F.batch_norm)


def _names_of_functional(forward: FunctionType) -> frozenset[str]:
    """The names by which `F.batch_norm` is called, if nothing but attributes is ever asked of them."""
    loads = [
        (one.argval, after)
        for one, after in instructions_of(forward.__code__)
        if one.opname == "LOAD_GLOBAL" and forward.__globals__.get(one.argval) is F
    ]
    calling = {name for name, after in loads if asks_for_attribute(after) and after.argval == "batch_norm"}
    return frozenset(calling - {name for name, after in loads if not asks_for_attribute(after)})


def _needs_its_globals(forward: FunctionType) -> bool:
    instructions = [one for one, _ in instructions_of(forward.__code__)]
    names = {one.argval for one in instructions if one.opname == "LOAD_GLOBAL"}
    operations = {one.opname for one in instructions}
    return bool(operations & _OPERATIONS_ON_GLOBALS or names & _FUNCTIONS_OF_GLOBALS)
