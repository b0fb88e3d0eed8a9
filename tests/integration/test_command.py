"""The command `statsd-bn` in separate processes, also in a folder that has a server.py."""

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.contract_seed import WAIT_SECONDS, environment, run, serving
from support.paths import ROOT

PATH = {"PYTHONPATH": str(ROOT)}

# The code of the script `statsd-bn` as pip writes it.
MODULE, FUNCTION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["statsd-bn"].split(":")
SCRIPT = f"import sys; sys.argv[0] = 'statsd-bn'; from {MODULE} import {FUNCTION}; sys.exit({FUNCTION}())"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", SCRIPT, *arguments]


def in_folder(folder: Path) -> dict[str, Any]:
    """Arguments for a process; its error output is captured."""
    return {"cwd": folder, "env": environment(**PATH), "stderr": subprocess.PIPE, "text": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    for name in ("server", "client"):
        (folder / f"{name}.py").write_text("print('mine')\n")
    return folder


@pytest.fixture(scope="module")
def endpoint(folder) -> Iterator[str]:
    serve = command("serve", "--bind", f"ipc://{folder}/s")
    with serving(serve, folder, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}") as server:
        yield server.endpoint


def test_it_serves_in_a_folder_that_has_a_server_py(endpoint, folder):
    assert endpoint.startswith("ipc://")
    assert run(*command("check", endpoint), cwd=folder, **PATH).returncode == 0


def test_no_arguments_print_the_help(folder):
    result = run(*command(), cwd=folder, **PATH)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: statsd-bn [COMMAND]")


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"]])
def test_a_closed_pipe_at_stdout_is_no_error(endpoint, folder, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command(*arguments, endpoint), stdout=writing, check=False, **in_folder(folder))
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_status_watch_runs_until_ctrl_c(endpoint, folder):
    watching = subprocess.Popen(command("status", "--watch", endpoint), stdout=subprocess.PIPE, **in_folder(folder))
    lines = [watching.stdout.readline() for _ in range(6)]
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=WAIT_SECONDS)
    assert [line.startswith("server ") for line in lines] == [True, False, False, True, False, False]
    assert (watching.returncode, errors) == (0, "")
