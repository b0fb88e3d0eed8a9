"""The architecture: imports, the wheel, the oldest versions, package docstrings, and the forbidden phrase `is none`."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

from documentation import import_graph
from support.paths import ROOT

REPOSITORY = ROOT


def test_the_core_loads_no_socket_library():
    program = "import sys, statsd_bn; assert not {'zmq', 'asyncio', 'multiprocessing'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_wheel_holds_the_three_packages_typed_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=60, stdout=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"statsd_bn", "server", "client"}
    for package in ("statsd_bn", "server", "client"):
        sources = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / package).rglob("*.py")}
        assert {f"{package}/py.typed", *sources} <= names
    assert not {name for name in names if "test" in name or "__pycache__" in name}
    assert "statsd-bn = statsd_bn.name_conflicts:main" in entry_points


def test_the_oldest_versions_that_users_may_install_are_tested():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = "torch", "lightning", "accelerate", "demo"
    wanted = [*project["dependencies"], *(extras[name] for name in users)]
    admitted = dict(re.findall(r"([\w-]+)>=([\d.]+)", str(wanted)))
    oldest = (REPOSITORY / "constraints-oldest.txt").read_text()
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", oldest, re.MULTILINE))
    del tested["triton"]  # part of torch for CUDA
    assert tested.keys() == admitted.keys()
    for name, version in tested.items():
        assert re.fullmatch(re.escape(admitted[name]) + r"(\.0)*", version), f"{name}: {admitted[name]}, {version}"


PACKAGES = [path for path in import_graph.modules().values() if path.name == "__init__.py"]


def test_no_two_files_import_each_other():
    ring = import_graph.cycle(import_graph.imports())
    assert not ring, " -> ".join(ring)


def test_packages_import_only_from_lower_floors():
    assert import_graph.cycle(import_graph.packages(import_graph.imports())) == []


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.relative_to(ROOT).as_posix())
def test_every_package_has_a_docstring_of_two_parts(path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first, _, more = docstring.partition("\n\n")
    assert first, "expected a docstring that says what belongs there"
    assert more, "expected a second paragraph: what belongs elsewhere, what the package may not do, or its entry point"


def test_the_code_that_talks_to_the_server_imports_no_torch():
    paths = [*(ROOT / "client" / "session").rglob("*.py")]
    assert len(paths) > 10
    for path in paths:
        assert not re.search(r"^\s*(import|from) torch\b", path.read_text(), re.MULTILINE), path


def test_no_text_contains_is_none_or_are_none():
    """Readers take "the group is none" for `group is None`, and None is a valid value of a group."""
    pattern = re.compile("(is|are) none")
    lines = (
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in import_graph.modules().values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    )
    assert not list(lines), "say what it is not: `is not a group`, `holds no keys`"
