"""The interface as lines of text, which `tests/contract/test_interface.py` compares with its snapshot.

A line names one thing and says what callers rely on: an argument with its kind and default, a flag with its values, a
variable, an exit code, an error with its code. It leaves out annotations, docstrings, and members inherited from torch,
which depend on torch's version.
"""

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn

import client
import client.comm
import server
import server.__main__
import statsd_bn
from server.config import Parser
from statsd_bn import errors
from support.paths import ROOT

OURS = ("client", "server", "statsd_bn")

# Modules that users of Synchronized-BatchNorm-PyTorch import by name.
SEED = ("client.batchnorm", "client.comm", "client.replicate")

# Public because pickles refer to it; not in `__all__`.
IN_PICKLES = {"client": ("rebuilt_layer",)}

# The promised members of classes that also have public members for internal use.
PROMISED = {
    "client.CallbackContext": (),
    "client.Connection": (
        *("__enter__", "__exit__", "all_gather", "close", "closed", "endpoint", "first_step", "is_in_process"),
        *("median_round_trip", "members", "metrics", "rank", "rank_and_size", "transport", "why_not_faster"),
    ),
    "client.SlavePipe": ("__init__", "rank", "run_slave"),
    "client.comm.SlavePipe": ("run_slave",),
    "server.FutureResult": ("__init__", "done", "get", "put"),
    "server.Service": ("__init__", "__enter__", "__exit__", "close", "reload", "run", "stop"),
    "server.SyncMaster": ("nr_slaves", "register_slave", "run_master"),
    "statsd_bn.Aggregate": (),
    "statsd_bn.RoundKey": ("__init__", "of_phase"),
    "statsd_bn.Rows": ("__init__",),
}

# Integrations are read, not imported: the framework of each may not be installed.
INTEGRATIONS = ROOT / "client" / "integrations"

# Our environment variables as the code names them; it composes the names of the limits' variables from options.
VARIABLE = re.compile(r"\bSTATSD_BN_[A-Z_]+\b")


def lines() -> list[str]:
    """All lines of the interface, in order."""
    return [
        *_module(client),
        *(line for name in SEED for line in _module(importlib.import_module(name))),
        *_module(server),
        *_module(statsd_bn),
        *_errors(),
        *_integrations(),
        *_commands(),
        *_exit_codes(),
        *_variables(),
    ]


def _module(module: ModuleType) -> Iterator[str]:
    """The names of `__all__`, each with its signature, and the methods of classes."""
    for name in sorted((*module.__all__, *IN_PICKLES.get(module.__name__, ()))):
        value = getattr(module, name)
        place = f"{module.__name__}.{name}"
        home = re.sub(r"\A.*\.", "", getattr(value, "__module__", "") or "")
        if module.__name__ in SEED and getattr(client, name, None) is value and home != "comm":
            yield f"{place} is client.{name}"
        elif inspect.isclass(value):
            yield from _class(place, value)
        elif callable(value):
            yield f"{place}{_signature(value)}"
        else:
            yield f"{place}: {type(value).__name__}"


def _class(place: str, kind: type) -> Iterator[str]:
    bases = [base for base in kind.__mro__[1:] if _is_public(base)]
    named = ", ".join(f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in bases)
    yield f"class {place} of {named}" if named else f"class {place}"
    promised = PROMISED.get(place)
    if _has_constructor_of_ours(kind) and (promised is None or "__init__" in promised):
        yield f"{place}{_signature(kind)}"
    inherited = {name for base in bases if _is_ours(base) for name in _own_names(base)}
    for name in sorted(_own_names(kind) - inherited if promised is None else set(promised) - {"__init__"}):
        value = inspect.getattr_static(kind, name, None)
        if isinstance(value, (property, functools.cached_property)):
            yield f"{place}.{name}: property"
        elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            yield f"{place}.{name}{_signature(getattr(kind, name))}"


def _has_constructor_of_ours(kind: type) -> bool:
    made = next((base for base in kind.__mro__ if "__init__" in vars(base) or "__new__" in vars(base)), object)
    return _is_ours(made) and not issubclass(kind, BaseException)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in OURS


def _is_public(base: type) -> bool:
    """Whether a base is one of our public classes, or a class of torch that ours replace."""
    if _is_ours(base):
        return any(getattr(importlib.import_module(package), base.__name__, None) is base for package in OURS)
    return base in {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.DataParallel}


def _own_names(kind: type) -> set[str]:
    """The public names that a class or its bases of ours define."""
    found = (name for base in kind.__mro__ if _is_ours(base) for name in vars(base))
    special = {"__enter__", "__exit__", "__iter__", "__len__", "__data_parallel_replicate__"}
    return {name for name in found if not name.startswith("_") or name in special}


def _signature(function: Any) -> str:
    """Names, kinds and defaults of the arguments."""
    found = inspect.signature(function)
    arguments = [
        argument.replace(annotation=argument.empty, default=_default(argument.default))
        for argument in found.parameters.values()
    ]
    return str(found.replace(parameters=arguments, return_annotation=found.empty))


class _Written:
    """A default as the snapshot writes it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty or value is None or isinstance(value, (bool, int, float, str, tuple, bytes)):
        return _Written(repr(value.value)) if isinstance(value, Enum) else value
    return _Written("...")


def _errors() -> Iterator[str]:
    """Error classes that scripts catch, with their bases and their codes in messages."""
    kinds = (kind for _, kind in inspect.getmembers(errors, inspect.isclass))
    for kind in sorted(
        (kind for kind in kinds if issubclass(kind, errors.StatsdBNError)), key=lambda each: each.__name__
    ):
        bases = ", ".join(base.__name__ for base in kind.__mro__[1:-3] if base is not Exception)
        yield f"statsd_bn.errors.{kind.__name__}({bases}): code {kind.code!r}"


def _integrations() -> Iterator[str]:
    for path in sorted(INTEGRATIONS.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                yield from _read(f"client.integrations.{path.stem}.{node.name}", node)


def _read(place: str, node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Like `_module`, for source code that is not imported."""
    if isinstance(node, ast.FunctionDef):
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        yield f"{place}({ast.unparse(node.args)})"
        return
    yield place
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and (not inner.name.startswith("_") or inner.name == "__init__"):
            yield from _read(f"{place}.{inner.name}", inner)


class _Made(Exception):
    """Carries the parser out of a command."""


def _commands() -> Iterator[str]:
    """The flags of each command, from its parser: `parse_args` is replaced to intercept it."""
    for name in ("serve", *sorted(server.__main__.COMMANDS)):
        for action in _parser(name)._actions:
            if not isinstance(action, argparse._HelpAction):
                yield f"python -m server {name} {_flag(action)}"


def _parser(name: str) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise _Made(parser)

    with mock.patch.dict("os.environ") as environ, mock.patch.object(Parser, "parse_args", stop):
        for variable in [each for each in environ if each.startswith("STATSD_BN_")]:
            del environ[variable]
        try:
            server.__main__.main([name])
        except _Made as made:
            return made.args[0]
    raise AssertionError(f"expected `python -m server {name}` to parse its arguments, but it does not")


def _flag(action: argparse.Action) -> str:
    name = "/".join(action.option_strings) or (action.metavar or action.dest)
    parts = [name]
    if action.option_strings and action.nargs != 0:
        parts.append("{" + ",".join(action.choices) + "}" if action.choices else action.metavar or action.dest.upper())
    if action.nargs == "?":
        parts.append("(may be left out)")
    if isinstance(action, argparse._AppendAction):
        parts.append("(repeatable)")
    return " ".join(map(str, parts))


def _exit_codes() -> Iterator[str]:
    for error, code in sorted(server.__main__.EXIT_CODES.items(), key=lambda item: item[1]):
        yield f"exit code {code}: {error.__name__}"


def _variables() -> Iterator[str]:
    """Environment variables of each package: our own, and the launchers' that the client reads."""
    for package in OURS:
        found = {name for text in _texts(package) for name in VARIABLE.findall(text)}
        if package == "client":
            found |= variables_of(package)
        for name in sorted(found):
            yield f"{package} has the variable {name}"


def _texts(package: str) -> Iterator[str]:
    """The strings of a package, docstrings left out."""
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def variables_of(package: str) -> set[str]:
    """The environment variables that a package looks up by a name in its code."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / package).rglob("*.py"))
    return {name for tree in trees for node in ast.walk(tree) for name in _looked_up(node)}


def _looked_up(node: ast.AST) -> list[str]:
    """Each NAME in `environ.get("NAME")`, `environ["NAME"]`, or a call with an environment and names."""
    match node:
        case ast.Call(func=ast.Attribute(value=environ, attr="get"), args=names):
            pass
        case ast.Call(args=[environ, *names]):
            pass
        case ast.Subscript(value=environ, slice=name):
            names = [name]
        case _:
            return []
    if ast.unparse(environ) not in {"environ", "os.environ", "task", "_task(environ)"}:
        return []
    found = [name.value for name in names if isinstance(name, ast.Constant)]
    return [name for name in found if isinstance(name, str) and name.isupper()]
