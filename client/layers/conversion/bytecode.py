"""Bytecode: what the code of a function asks for, instruction by instruction."""

import dis
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType


def instructions_of(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Each instruction but the last, which returns, with the one behind it; then those of functions inside."""
    yield from pairwise(found for found in dis.get_instructions(code) if found.opname != "EXTENDED_ARG")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from instructions_of(constant)


def asks_for_attribute(instruction: dis.Instruction) -> bool:
    """Whether it reads an attribute of what the one before has loaded."""
    return instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"}
