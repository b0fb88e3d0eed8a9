"""A user's `client.py` next to the script."""

import subprocess
import sys

import pytest

from support.paths import ROOT


def run(folder, program):
    (folder / "script.py").write_text(program)
    command = [sys.executable, "-W", "always", folder / "script.py"]
    environ = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stderr


@pytest.mark.parametrize("form", ["client.py", "client/__init__.py"])
def test_a_foreign_module_imported_instead_of_ours_is_reported(tmp_path, form):
    (tmp_path / form).parent.mkdir(exist_ok=True)
    (tmp_path / form).write_text("")
    told = run(tmp_path, "import client\nfrom statsd_bn.errors import ReplicaLost")
    assert f"client: expected the package of statsd_bn, {ROOT}/client, got '{tmp_path}/{form}'" in told


# Torch takes seconds to load, so once for both.
IN_BOTH_ORDERS = """
import os, torch
if os.fork():
    import client, statsd_bn
    assert os.wait()[1] == 0
else:
    import statsd_bn, client
"""


@pytest.mark.processes
@pytest.mark.parametrize("program", [IN_BOTH_ORDERS, "import statsd_bn"])
def test_our_module_is_recognised(tmp_path, program):
    assert "client: expected" not in run(tmp_path, program)
