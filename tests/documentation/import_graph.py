"""Imports among the modules of client/, server/ and statsd_bn/, inside functions and under TYPE_CHECKING too."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from support.paths import ROOT

ROOTS = ("client", "server", "statsd_bn")

Graph = Mapping[str, set[str]]


@cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    files = (path for top in ROOTS for path in sorted((root / top).rglob("*.py")))
    return {_name(path.relative_to(root)): path for path in files}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(root: Path = ROOT) -> Graph:
    known = modules(root)
    return {name: set(_imported(path, known)) - {name} for name, path in known.items()}


def _imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: expected the whole name of the module, got a relative import"
            for alias in node.names:
                # `from package import name` names a module if there is one, and else the package.
                module = f"{node.module}.{alias.name}"
                yield from (name for name in [module if module in known else node.module] if name in known)


def cycle(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def packages(graph: Graph) -> dict[str, set[str]]:
    """Imports among packages (folders, and the files next to them), without the public `client` and `server`."""
    edges: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if "." in module:
            package = package_of(module)
            edges.setdefault(package, set()).update({package_of(name) for name in imported} - {package, "server"})
    edges.setdefault("statsd_bn", set())
    return edges


def package_of(module: str) -> str:
    return "statsd_bn" if module.startswith("statsd_bn") else ".".join(module.split(".")[:2])


def floors(edges: Graph) -> dict[str, int]:
    found: dict[str, int] = {}
    for package in TopologicalSorter(edges).static_order():
        found[package] = max((found[name] + 1 for name in edges[package]), default=0)
    return found
