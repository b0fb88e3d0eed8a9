"""Writes the parts of docs/architecture.md that follow from the code: the drawing and the list of files."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from documentation import import_graph
from support.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"

# A generated part of the page, with the lines that mark its beginning and end.
PART = re.compile(r"(<!-- (\w+): made by scripts/docs write -->\n).*?(<!-- end -->)", re.DOTALL)

# A clause ends at "." or ";". The subject, as in "Barrier: where replicas meet", only repeats the name of the file.
CLAUSE = re.compile(r".*?(?=[.;](?:\s|$)|$)")
SUBJECT = re.compile(r"^[\w`().]+(?: [\w`().]+){0,3}: ")

# A file's entry ends before the explanation, which a reader finds in the file.
DETAIL = re.compile(r": |, (?:which|where|so that|with|without|as|by|for|when|computed|in bounded) ")

SIDES = ("client", "server")
GROUND = "statsd_bn"


def page(text: str) -> str:
    made = {"drawing": drawing(), "files": files()}
    return PART.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", text)


def drawing() -> str:
    """The packages of both sides on floors, each package one floor above the highest package that it imports."""
    floors = import_graph.floors(import_graph.packages(import_graph.imports()))
    sides = [[*_side(side, floors)] for side in SIDES]
    width = max(len(line) for lines in sides for line in lines)
    ground = f"[{GROUND.center(width - 2)}]"
    return "\n".join(["```", *sides[0], ground, "", *sides[1], ground, "```"])


def _side(side: str, floors: dict[str, int]) -> Iterator[str]:
    # A package that imports none of ours stands on floor 1 too, above the ground.
    of_side = {name: max(floor, 1) for name, floor in floors.items() if name.startswith(f"{side}.")}
    yield f"{side}/"
    for floor in range(max(of_side.values()), 0, -1):
        if here := sorted(_label(name) for name in of_side if of_side[name] == floor):
            yield f"{floor}  " + " ".join(f"[{name}]" for name in here)
            yield "   v"


def _label(name: str) -> str:
    path = import_graph.modules()[name]
    return path.parent.name if path.name == "__init__.py" else path.name


def files() -> str:
    lines = []
    for folder, paths in groupby(
        sorted(_sources(), key=lambda path: (path.parent, path.name)), lambda path: path.parent
    ):
        inside = [path for path in paths if path.name != "__init__.py"]
        lines += ["", f"{folder.relative_to(ROOT).as_posix()}/  {_summary(folder / '__init__.py')}".rstrip()]
        width = max((len(path.name) for path in inside), default=0)
        lines += [f"  {path.name:{width}}  {_brief(_summary(path))}".rstrip() for path in inside]
    return "\n".join(["```", *lines[1:], "```"])


def _sources() -> Iterator[Path]:
    yield from import_graph.modules().values()
    yield from (ROOT / "client" / "native" / "core").glob("*.[ch]")


def _summary(path: Path) -> str:
    """The first clause of a file's first paragraph, without its subject; empty where there is no file."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    line = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text[2:].replace("\n *", "")
    clause = CLAUSE.match(SUBJECT.sub("", " ".join(line.partition("\n\n")[0].split())))[0]
    return clause[:1].upper() + clause[1:]


def _brief(summary: str) -> str:
    """A summary without its explanation, if at least three words remain."""
    main, *_ = DETAIL.split(summary)
    return main if len(main.split()) > 2 else summary


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
