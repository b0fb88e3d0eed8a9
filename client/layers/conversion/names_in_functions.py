"""Names in functions: what a function may come to, as far as its names tell.

What torch's functions and ours come to is not looked at.
"""

import functools
import inspect
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

# How deep a `forward` is followed through the functions that it calls.
_DEPTH = 4


def mention(functions: Iterable[FunctionType], wanted: set[str]) -> bool:
    """Whether one of the names is in functions, or in what they call."""
    return any(names_of(function) & wanted for function in with_called(functions))


def with_called(functions: Iterable[FunctionType]) -> Collection[FunctionType]:
    """Functions, those that they call, as far as names tell, and those that these call."""
    found = newest = dict.fromkeys(functions)
    for _ in range(_DEPTH):
        called = dict.fromkeys(other for function in newest for other in _called(function))
        newest = {function: None for function in called if function not in found}
        found = found | newest
    return found


def functions_in(value: Any) -> Iterator[FunctionType]:
    """A function, and those that its decorators say they wrap; none of anything else."""
    seen: list[Any] = []
    while not any(value is one for one in seen):
        seen.append(value)
        if isinstance(value, FunctionType):
            yield value
        # Statically, since some objects answer whatever they are asked for.
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else wrapped


def innermost(value: Any) -> Any:
    """The function that decorators have wrapped; anything else as it is."""
    return next(reversed([*functions_in(value)]), value)


def comes_to(function: FunctionType, name: str, module: str) -> bool:
    """Whether what a function calls is called so, or it imports that from a module."""
    names = names_in(function.__code__)
    values = [*_values(function), *_attributes(_values(function), names)]
    called = (value.__name__ for value in values if isinstance(value, FunctionType))
    return name in called or {name, module} <= names


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """The functions behind the names in one, also as attributes of modules and classes, but for torch's and ours."""
    names = names_in(function.__code__)
    values = [value for value in _values(function) if not is_of(value, "torch")]
    for other in (*values, *_attributes(values, names)):
        yield from (found for found in functions_in(other) if not is_of(found, "torch") and not is_of(found, "client"))


def _attributes(values: Iterable[Any], names: set[str]) -> Iterator[Any]:
    """What modules and classes have by these names, also inside of modules, as `torch.utils.checkpoint.checkpoint`."""
    places = dict.fromkeys(value for value in values if isinstance(value, ModuleType | type))
    for place in (found := list(places)):
        for value in (vars(place).get(name) for name in names):
            if isinstance(value, ModuleType) and value not in places:
                places[value] = None
                found.append(value)
            yield value


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
    if isinstance(value, FunctionType):
        module = value.__globals__.get("__name__")  # a decorator gives its function the other one's `__module__`
    else:
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return isinstance(module, str) and module.partition(".")[0] == package


def names_of(function: FunctionType) -> set[str]:
    """The names in a function, and the own names of functions that it calls by others."""
    functions = (value for value in _values(function) if isinstance(value, FunctionType | BuiltinFunctionType))
    return names_in(function.__code__).union(value.__name__ for value in functions)


def names_in(code: CodeType) -> set[str]:
    """The names outside of it that a code reads, with those of functions inside."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
