"""The texts of the product that a user can meet, collected from the syntax trees and written with placeholders."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("client", "server", "statsd_bn")
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
OUTPUT = ("print", "write", "exit")
TEXT_NODES = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp)
# Two words that stand next to each other, outside placeholders.
PROSE = re.compile(r"[A-Za-z'_]{2,}[,:;]? [A-Za-z'_]+")
FORMAT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?([sdrgfx%])")
LONGEST_PLACEHOLDER = 32
ERRORS = re.compile(r"(Error|Warning|Exception|Refused|Mismatch|Closed|Stopped|Unreachable|Failed|Lost|Exceeded)$")

Text = tuple[str, str]


def page(root: Path) -> str:
    """A paragraph per module, with a line per text: by level, error classes first, then in the source's order."""
    paragraphs = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        found = sorted(dict.fromkeys(texts(path.read_text())), key=lambda text: text[0])
        if found:
            width = max(len(level) for level, _ in found)
            lines = [f"  {level:{width}}  {text}" for level, text in found]
            paragraphs.append("\n".join([str(path.relative_to(root)), *lines, ""]))
    return "\n".join(paragraphs)


def texts(source: str) -> Iterator[Text]:
    """Every string of two words or more with its level: an error's class, `warning`, `log.*`, `output`, `text`."""
    yield from _texts(ast.parse(source), "text")


def _texts(node: ast.AST, level: str) -> Iterator[Text]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    level = _level(node, level)
    if isinstance(node, ast.Call) and level.startswith("log.") and _is_logger(node):
        at = 1 if level == "log.log" else 0
        template, values = node.args[at], list(node.args[at + 1 :])
        if isinstance(template, ast.Constant):
            yield level, _line(_formatted(template.value, values))
            for value in values:
                yield from _texts(value, "text")
            return
    if isinstance(node, TEXT_NODES):
        text, holes = _rendered(node)
        if not text.startswith("\n") and PROSE.search(re.sub(r"\{[^{}]*\}", "{}", text)):
            yield level, _line(text)
            for hole in holes:
                yield from _texts(hole, "text")
            return
    for child in _children(node):
        yield from _texts(child, level)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list"}:
            continue
        if isinstance(node, ast.keyword) and node.arg in {"help", "description", "epilog"}:
            continue
        if isinstance(node, ast.Call) and _name(node.func) in {"compile", "cast", "TypeVar"}:
            continue
        yield from (child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST))


def _level(node: ast.AST, level: str) -> str:
    if not isinstance(node, ast.Call):
        return level
    name = _name(node.func)
    if _is_logger(node):
        return f"log.{name}"
    if name == "warn":
        return "warning"
    if name in OUTPUT:
        return "output"
    if ERRORS.search(name) and name[0].isupper():
        return name
    return "text"


def _is_logger(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute) and function.attr in LEVELS and _name(function.value) in {"logger", "log"}
    )


def _rendered(node: ast.AST) -> tuple[str, list[ast.AST]]:  # noqa: PLR0911 - one return for each kind of node
    """The text of an expression, and the expressions inside its placeholders."""
    match node:
        case ast.Constant(value=str(text)):
            return text, []
        case ast.JoinedStr(values=values):
            parts = [_rendered(value) for value in values]
            return "".join(text for text, _ in parts), [hole for _, holes in parts for hole in holes]
        case ast.FormattedValue(value=ast.IfExp() as choice):
            text, holes = _rendered(choice)
            return text, holes
        case ast.BinOp(left=left, op=ast.Add(), right=right) | ast.IfExp(body=left, orelse=right):
            (one, holes), (other, others) = _rendered(left), _rendered(right)
            joined = one + other if isinstance(node, ast.BinOp) else f"{{{one.strip('{}')}|{other.strip('{}')}}}"
            return joined, holes + others
        case ast.BinOp(left=ast.Constant(value=str(template)), op=ast.Mod(), right=right):
            values = right.elts if isinstance(right, ast.Tuple) else [right]
            return _formatted(template, values), list(values)
        case ast.FormattedValue(value=value):
            return _placeholder(value), [value]
        case _:
            return _placeholder(node), [node]


def _formatted(template: str, values: list[ast.expr]) -> str:
    names = [_placeholder(value) for value in values if not isinstance(value, ast.Starred)]
    starred = [_placeholder(value.value) for value in values if isinstance(value, ast.Starred)]
    missing = len([kind for kind in FORMAT.findall(template) if kind != "%"]) - len(names)
    remaining = iter(starred * missing + names if starred else names)

    def filled(match: re.Match[str]) -> str:
        return "%" if match[1] == "%" else next(remaining, "{...}")

    return FORMAT.sub(filled, template)


def _placeholder(node: ast.AST) -> str:
    text = ast.unparse(node)
    if len(text) > LONGEST_PLACEHOLDER:
        text = f"{_name(node)}(...)" if isinstance(node, ast.Call) and _name(node) else "..."
    return f"{{{text}}}"


def _name(node: ast.AST) -> str:
    match node:
        case ast.Call(func=function):
            return _name(function)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def _line(text: str) -> str:
    return text.replace("\n", "\\n").strip()
