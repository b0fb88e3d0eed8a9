import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

from support.paths import ROOT

REPOSITORY = ROOT

LOADED = """
import sys, {module}
foreign = sorted({{"torch", "client"}} & set(sys.modules))
assert not foreign, foreign
"""


@pytest.mark.parametrize("module", ["statsd_bn", "server", "server.__main__"])
def test_the_server_loads_neither_torch_nor_the_client(module):
    subprocess.run([sys.executable, "-c", LOADED.format(module=module)], check=True, timeout=60)


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
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    assert "statsd-bn = server.__main__:main" in entry_points


def test_the_oldest_versions_are_tested_that_users_may_install():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = "torch", "compiled", "lightning", "accelerate", "demo"
    wanted = [*project["dependencies"], *(extras[name] for name in users)]
    admitted = dict(re.findall(r"([\w-]+)>=([\d.]+)", str(wanted)))
    oldest = (REPOSITORY / "constraints-oldest.txt").read_text()
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", oldest, re.MULTILINE))
    assert tested.keys() == admitted.keys()
    for name, version in tested.items():
        assert re.fullmatch(re.escape(admitted[name]) + r"(\.0)*", version), f"{name}: {admitted[name]}, {version}"
