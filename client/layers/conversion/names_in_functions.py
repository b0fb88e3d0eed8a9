"""Names in functions: what a function may come to, as far as its names tell.

What torch's functions and ours come to is not looked at.
"""

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

# How deep a `forward` is followed through the functions that it calls.
_DEPTH = 4


def mention(functions: Iterable[FunctionType], wanted: set[str]) -> bool:
    """Whether one of the names is in functions, or in what they call."""
    return any(names_of(function) & wanted for function in with_called(functions))


def with_called(functions: Iterable[FunctionType]) -> Iterable[FunctionType]:
    """Functions, those that they call, as far as names tell, and those that these call."""
    found = newest = dict.fromkeys(functions)
    for _ in range(_DEPTH):
        called = dict.fromkeys(other for function in newest for other in _called(function))
        newest = {function: None for function in called if function not in found}
        found = found | newest
    return found


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """The functions behind the names in one, also as attributes of modules and classes, but for torch's and ours."""
    names = names_in(function.__code__)
    values = [value for value in _values(function) if not is_of(value, "torch")]
    attributes = (vars(value).get(name) for value in values if isinstance(value, ModuleType | type) for name in names)
    for other in map(undecorated, (*values, *attributes)):
        if isinstance(other, FunctionType) and not is_of(other, "torch") and not is_of(other, "client"):
            yield other


def _values(function: FunctionType) -> Iterator[Any]:
    """What a function finds by its names outside of itself, and its defaults; of a `functools.partial` the function."""
    for value in _found(function):
        yield value.func if isinstance(value, functools.partial) else value


def _found(function: FunctionType) -> Iterator[Any]:
    """The same as it is; a decorator finds there what it decorates."""
    yield from (function.__globals__.get(name) for name in names_in(function.__code__))
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # one that is still empty
            if name != "__class__":
                yield cell.cell_contents


def is_of(value: Any, package: str) -> bool:
    """Whether a module, class or function is in a package."""
    if not isinstance(value, ModuleType | type | FunctionType):
        return False
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return isinstance(module, str) and module.partition(".")[0] == package


def undecorated(function: Any) -> Any:
    """The function that decorators have wrapped; anything else as it is."""
    return inspect.unwrap(function) if callable(function) else function


def names_of(function: FunctionType) -> set[str]:
    """The names in a function, and the own names of functions that it calls by others."""
    functions = (value for value in _values(function) if isinstance(value, FunctionType | BuiltinFunctionType))
    return names_in(function.__code__).union(value.__name__ for value in functions)


def names_in(code: CodeType) -> set[str]:
    """The names outside of it that a code reads, with those of functions inside."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
