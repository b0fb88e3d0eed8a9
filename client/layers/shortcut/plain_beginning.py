"""Plain beginnings: whether all is known that a `forward` does until it comes to `F.batch_norm`.

Usually that counts the batch and reads some tensors. Then nobody need look on, and each of these steps is spared the
way through a mode of torch's, which takes 10 µs between other work. What is not known here, as in a newer Python, is
taken for something that must be looked at.
"""

import builtins
import dis
import inspect
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import nn

from client.layers.conversion.bytecode import asks_for_attribute

Code = list[dis.Instruction]

# They call nothing, but for the operators of what the forward has at hand.
_FAMILIES = ("BINARY_", "BUILD_", "COMPARE_", "FORMAT_", "JUMP_IF_", "LIST_", "POP_JUMP_", "UNARY_")
_CALLS = frozenset({"CALL", "CALL_FUNCTION_EX"})
_OTHERS = _CALLS | {
    *("CONTAINS_OP", "COPY", "COPY_FREE_VARS", "DICT_MERGE", "IS_OP", "JUMP_FORWARD"),
    *("KW_NAMES", "LOAD_ATTR", "LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD", "MAKE_CELL", "NOP", "POP_TOP"),
    *("PRECALL", "RAISE_VARARGS", "RESUME", "RETURN_VALUE", "STORE_FAST", "SWAP"),
}
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)

_FUNCTIONS = (float, int, isinstance, len, torch._assert, ValueError)  # noqa: SLF001 - others call it too


def begins_plainly(forward: FunctionType, kind: type, batch_norm: Any) -> bool:
    """Whether a `forward` calls nothing but known functions until it calls `batch_norm` or ends.

    Args:
        forward: with a call of `F.batch_norm`.
        kind: the class whose forward it is.
        batch_norm: what `F.batch_norm` is for it.
    """
    code = [one for one in dis.get_instructions(forward.__code__) if one.opname != "EXTENDED_ARG"]
    waiting: list[Code] = []
    for index, (owner, one) in enumerate(pairwise(code), start=1):
        if not (one.opname in _OTHERS or one.opname.startswith(_FAMILIES)) or _is_computed(owner, one, forward, kind):
            return False
        if _loads_callable(one):
            waiting.append(code[index - 1 : index + 2])
        if one.opname in _CALLS:
            called = waiting.pop()
            if _function(called, forward) is batch_norm:
                return not forward.__code__.co_exceptiontable and not _passes_by(code[:index], one.offset)
            if not _is_known(called, forward, kind):
                return False
    return False


def _loads_callable(one: dis.Instruction) -> bool:
    # The interpreter puts a NULL beside what is to be called.
    return one.opname == "LOAD_METHOD" or "NULL" in one.argrepr


def _passes_by(code: Code, end: int) -> bool:
    """Whether a way leads past the call at `end`, to what nobody looked at."""
    return any(one.opcode in _JUMPS and not one.offset < one.argval <= end for one in code)


def _is_computed(owner: dis.Instruction, one: dis.Instruction, forward: FunctionType, kind: type) -> bool:
    """Whether it reads an attribute of the layer that runs code of the class."""
    if not (asks_for_attribute(one) and _is_argument(owner, 0, forward)):
        return False
    found = inspect.getattr_static(kind, one.argval, None)
    return hasattr(found, "__get__") and not isinstance(found, FunctionType)


def _is_known(called: Code, forward: FunctionType, kind: type) -> bool:
    owner, one, _ = called
    function = _function(called, forward)
    if function is not None:
        return any(function is each for each in _FUNCTIONS)
    match one.argval:
        case "add_":
            return asks_for_attribute(owner) and owner.argval == "num_batches_tracked"
        case "dim" | "size":
            return _is_argument(owner, 1, forward)
        case "_check_input_dim":
            is_torchs = getattr(kind, one.argval).__module__ == nn.modules.batchnorm.__name__
            return is_torchs and _is_argument(owner, 0, forward)
        case _:
            return False


def _function(called: Code, forward: FunctionType) -> Any:
    """What is called, if it is a global or an attribute of one."""
    owner, one, after = called
    if one.opname == "LOAD_GLOBAL":
        owner, one = one, after
    if owner.opname != "LOAD_GLOBAL":
        return None
    try:
        found = forward.__globals__[owner.argval]
    except KeyError:
        found = getattr(builtins, owner.argval, None)
    return getattr(found, one.argval, None) if asks_for_attribute(one) else found


def _is_argument(one: dis.Instruction, index: int, forward: FunctionType) -> bool:
    """Whether it loads the argument of that index; 0 is the layer, and 1 its input."""
    return one.opname == "LOAD_FAST" and one.argval == forward.__code__.co_varnames[index]
