"""Writes the parts of docs/architecture.md that follow from the code: the drawing and the table of packages."""

import ast
import re
from collections.abc import Iterator
from itertools import zip_longest

from documentation import import_graph
from support.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"

# A part of the page that this script writes stands between two such lines.
PART = re.compile(r"(<!-- (\w+): made by scripts/docs write -->\n).*?(<!-- end -->)", re.DOTALL)

SIDES = ("client", "server")
GROUND = "statsd_bn"


def page(text: str) -> str:
    """The page as the code has it.

    Args:
        text: the page as it is.
    """
    made = {"drawing": drawing(), "packages": package_table()}
    return PART.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", text)


def drawing() -> str:
    """The packages on their floors: each stands one floor above the highest that it imports."""
    floors = import_graph.floors(import_graph.packages(import_graph.imports()))
    left, right = ([*_side(side, floors)] for side in SIDES)
    width = max(len(line) for line in left)
    # Both sides stand on the same ground, so the lower one begins further down.
    upside_down = zip_longest(reversed(left), reversed(right), fillvalue="")
    lines = [f"{one:{width}}    {other}".rstrip() for one, other in reversed(list(upside_down))]
    whole = max(len(line) for line in lines)
    return "\n".join(["```", *lines, f"[{GROUND.center(whole - 2)}]", "```"])


def _side(side: str, floors: dict[str, int]) -> Iterator[str]:
    """The lines of one side, from its top down to the ground."""
    # What imports nothing of ours stands above the ground all the same.
    of_side = {name: max(floor, 1) for name, floor in floors.items() if name.startswith(f"{side}.")}
    yield f"{side}/"
    for floor in range(max(of_side.values()), 0, -1):
        if here := sorted(_label(name) for name in of_side if of_side[name] == floor):
            yield f"{floor}  " + " ".join(f"[{name}]" for name in here)
            yield "   v"


def _label(name: str) -> str:
    path = import_graph.modules()[name]
    return path.parent.name if path.name == "__init__.py" else path.name


def package_table() -> str:
    """What each package imports, and what belongs there in the words of its docstring."""
    edges = import_graph.packages(import_graph.imports())
    floors = import_graph.floors(edges)
    rows = ["| package | imports | what belongs there |", "|---|---|---|"]
    for name in sorted(edges, key=lambda name: (name.partition(".")[0], -floors[name], name)):
        below = ", ".join(sorted(other.rpartition(".")[2] for other in edges[name])) or "none of ours"
        rows.append(f"| {_link(name)} | {below} | {_text(name)} |")
    parts = [name for name in import_graph.modules() if name.startswith(f"{GROUND}.") and _is_folder(name)]
    return "\n".join([*rows, *(f"| {_link(name)} | {GROUND} | {_text(name)} |" for name in parts)])


def _is_folder(name: str) -> bool:
    return import_graph.modules()[name].name == "__init__.py"


def _link(name: str) -> str:
    path = import_graph.modules()[name]
    path = (path.parent if _is_folder(name) else path).relative_to(ROOT).as_posix()
    return f"[{path}](../{path})"


def _text(name: str) -> str:
    """The docstring of a package in one line, up to a drawing in it."""
    docstring = ast.get_docstring(ast.parse(import_graph.modules()[name].read_text())) or ""
    return " ".join(docstring.partition("\n    ")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
