"""Plain beginnings: whether all is known that a `forward` does until it comes to `F.batch_norm`.

Usually that counts the batch and reads some tensors. Then nobody need look on, and each of these steps is spared the
way through a mode of torch's, which takes 10 µs between other work. So a plain one reads of the layer only what torch's
layers have, and calls only what is listed here. It is taken for granted that its arguments and operators do not
normalise by the layer's tensors, nor properties that the layer's class may get afterwards.

The steps are those of Python 3.11; in another one no beginning is plain.
"""

import builtins
import dis
import inspect
import sys
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import nn

from client.layers.conversion.bytecode import asks_for_attribute

Code = list[dis.Instruction]

ARE_STEPS_KNOWN = sys.version_info[:2] == (3, 11)

_CALLS = frozenset({"CALL", "CALL_FUNCTION_EX"})
_JUMPS = frozenset(dis.hasjrel)
# Kinds of steps that are listed: those that begin so, and others.
_FAMILIES = ("BINARY_", "BUILD_", "COMPARE_", "FORMAT_", "JUMP_IF_", "LIST_", "POP_JUMP_", "UNARY_")
_OTHERS = (
    _CALLS
    | {"CONTAINS_OP", "COPY_FREE_VARS", "DICT_MERGE", "IS_OP", "JUMP_FORWARD", "KW_NAMES", "NOP", "POP_TOP", "PRECALL"}
    | {"LOAD_ATTR", "LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD", "STORE_FAST", "SWAP"}
    | {"RAISE_VARARGS", "RESUME", "RETURN_VALUE"}
)

_OF_LAYER = frozenset(
    {"affine", "bias", "eps", "momentum", "num_batches_tracked", "num_features", "running_mean", "running_var"}
    | {"track_running_stats", "training", "weight"}
)
_OF_INPUT = frozenset({"dim", "dtype", "ndim", "shape", "size"})
_METHODS = frozenset({"_assert", "add_", "batch_norm", "dim", "size"})
_FUNCTIONS = (float, int, isinstance, len, ValueError, torch._assert)  # noqa: SLF001 - others call it too
_CONSTANTS = (bool, float, int, str, type(None))


def globals_of_plain(forward: FunctionType, kind: type[nn.Module], functional: Any) -> frozenset[str] | None:
    """The globals that a `forward` reads until it calls `batch_norm`; None unless it takes known steps only until then.

    So it is if it returns or raises before. The steps are known while these globals mean what they mean now.

    Args:
        forward: of a layer, which is its first argument.
        kind: the layer's class, which may have its `forward` from another one.
        functional: what stands for `torch.nn.functional` in the globals of `forward`.
    """
    if not ARE_STEPS_KNOWN or forward.__code__.co_exceptiontable or not _has_usual_attributes(kind):
        return None
    code = [one for one in dis.get_instructions(forward.__code__) if one.opname != "EXTENDED_ARG"]
    beginning = _until_batch_norm(code, forward, functional)
    is_plain = (
        bool(beginning)
        and all(_is_plain(one, beginning[-1].offset) for one in beginning)
        and all(_is_known(before, one, forward, functional) for before, one in pairwise(beginning))
    )
    return frozenset(one.argval for one in beginning if one.opname == "LOAD_GLOBAL") if is_plain else None


def _until_batch_norm(code: Code, forward: FunctionType, functional: Any) -> Code:
    """The instructions up to the call of `functional.batch_norm`; none if there is another call among its arguments."""
    for index, (before, one) in enumerate(pairwise(code), start=1):
        if asks_for_attribute(one) and one.argval == "batch_norm" and _global(before, forward) is functional:
            call = next((end for end in range(index, len(code)) if code[end].opname in _CALLS), len(code))
            arguments = code[index + 1 : call]
            return [] if any(_loads_callable(each) for each in arguments) else code[: call + 1]
    return []


def _has_usual_attributes(kind: type[nn.Module]) -> bool:
    """Whether no code of the class runs when an attribute is read that torch's layers have."""
    is_read_as_usual = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    return is_read_as_usual and not any(
        hasattr(inspect.getattr_static(kind, name, None), "__get__") for name in _OF_LAYER
    )


def _is_plain(one: dis.Instruction, end: int) -> bool:
    """Whether it is a step of a listed kind, and leads to no step behind the one at `end`, nor to an earlier one."""
    is_listed = one.opname in _OTHERS or one.opname.startswith(_FAMILIES)
    return is_listed and (one.opcode not in _JUMPS or one.offset < one.argval <= end)


def _is_known(before: dis.Instruction, one: dis.Instruction, forward: FunctionType, functional: Any) -> bool:
    """Whether it is known what a step reads, and what is called if it reads something to be called."""
    if asks_for_attribute(one):
        return _is_known_attribute(before, one, forward, functional)
    if _is_argument(before, 0, forward):
        return False  # the layer itself is handed on
    if one.opname == "STORE_FAST":
        return one.argval not in forward.__code__.co_varnames[:2]
    return one.opname != "LOAD_GLOBAL" or _is_known_global(one, forward, functional)


def _is_known_global(one: dis.Instruction, forward: FunctionType, functional: Any) -> bool:
    found = _global(one, forward)
    if any(found is each for each in (*_FUNCTIONS, torch, functional)):
        return True
    return isinstance(found, _CONSTANTS) and not _loads_callable(one)


def _is_known_attribute(owner: dis.Instruction, one: dis.Instruction, forward: FunctionType, functional: Any) -> bool:
    name = one.argval
    # Where steps come together, what was loaded before need not be what the attribute is asked of.
    if one.is_jump_target or (_loads_callable(one) and name not in _METHODS):
        return False
    if _is_argument(owner, 0, forward):
        return name in _OF_LAYER
    if _is_argument(owner, 1, forward):
        return name in _OF_INPUT
    if owner.opname == "LOAD_GLOBAL":
        known = {"_assert": torch, "batch_norm": functional}
        return name in known and _global(owner, forward) is known[name]
    return asks_for_attribute(owner) and owner.argval == "num_batches_tracked" and name == "add_"


def _is_argument(one: dis.Instruction, index: int, forward: FunctionType) -> bool:
    """Whether it loads the argument of that index: 0 is the layer, and 1 its input."""
    return one.opname == "LOAD_FAST" and one.argval == forward.__code__.co_varnames[index]


def _loads_callable(one: dis.Instruction) -> bool:
    # The interpreter puts a NULL beside what is to be called.
    return one.opname == "LOAD_METHOD" or "NULL" in one.argrepr


def _global(one: dis.Instruction, forward: FunctionType) -> Any:
    """The global that it loads, or None."""
    if one.opname != "LOAD_GLOBAL":
        return None
    try:
        return forward.__globals__[one.argval]
    except KeyError:
        return getattr(builtins, one.argval, None)
