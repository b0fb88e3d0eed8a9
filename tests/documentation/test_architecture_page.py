"""docs/architecture.md agrees with the code, and names only existing files and functions."""

import ast
import re
from pathlib import Path

import pytest

from documentation import architecture_page
from support.paths import ROOT

PAGE = architecture_page.PAGE
TEXT = PAGE.read_text()

# [`Name.method` and `CONSTANT`](../path): the file, or a file of the folder, defines them.
LINKS = re.findall(r"\[([^\]]*`[^\]]*)\]\(([^)#]+)\)", TEXT)
NAMED = sorted({(name, target) for label, target in LINKS for name in re.findall(r"`([\w.]+)`", label)})
PATHS = sorted(set(re.findall(r"(?:[\[`])((?:client|server|statsd_bn|scripts|tests|benchmarks|docs)/[\w/.-]*)", TEXT)))


def test_the_drawing_and_the_list_of_files_are_what_the_code_would_write():
    parts = architecture_page.PART.findall(TEXT)
    assert [name for _, name, _ in parts] == ["drawing", "files"]
    assert architecture_page.page(TEXT) == TEXT, "docs/architecture.md is older than the code; run scripts/docs write"


def test_the_page_names_paths_and_functions():
    assert len(PATHS) > 20
    assert len(NAMED) > 20


@pytest.mark.parametrize("path", PATHS)
def test_every_path_on_the_page_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "target"), NAMED)
def test_every_name_on_the_page_is_defined_where_its_link_leads(name, target):
    place = PAGE.parent / target
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    assert any(_defines(file, name.split(".")) for file in files), f"{target} defines no {name}"


def _defines(file: Path, names: list[str]) -> bool:
    found = ast.parse(file.read_text()).body
    for name in names:
        node = next((node for node in found if name in _names(node)), None)
        if node is None:
            return False
        found = getattr(node, "body", [])
    return True


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name()):
            return [node.target.id]
    return []
