"""`python -m server` takes no library from the folder where it is typed."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT


def run(folder, *arguments, **environ):
    command = [sys.executable, *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("form", [("-m", "server"), ("-mserver",), ("-u", "-m", "server")], ids=" ".join)
def test_a_file_with_the_name_of_a_library_is_not_run(tmp_path, form):
    for name in ("msgpack", "zmq", "numpy", "statsd_bn", "argparse", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__name__} was taken in')")
    ended = run(tmp_path, *form, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_clone_that_one_works_in_stays_on_the_search_path():
    program = "import sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-m', 'server']; import server, os; "
    ended = run(ROOT, "-c", program + "print(os.getcwd() in map(os.path.abspath, sys.path))", PYTHONPATH="")
    assert ended.stdout == "True\n", ended.stderr


@pytest.mark.parametrize("program", ["import server, msgpack", "import msgpack, server"])
def test_a_script_that_imports_the_package_keeps_its_search_path(tmp_path, program):
    (tmp_path / "msgpack.py").write_text("raise SystemExit('the script asked for it')")
    assert run(tmp_path, "-c", program).stderr == "the script asked for it\n"
