"""A server takes no path away from anybody.

At 6b62bd3: `--bind ipc://FILE` deletes a regular file, and a second server takes over a path where one listens.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from attacks import servers
from attacks.peers import Peers
from attacks.servers import ROOT, end, environment
from statsd_bn.messages import Status, StatusRequest

WRONG_USE = 2
CANNOT_BIND = 3
SECONDS = 15.0


def try_to_bind(endpoint: str) -> int | None:
    """The exit code of a server that is to listen at a path; None if it does."""
    command = [sys.executable, "-P", "-m", "server", "--bind", endpoint]
    options = {"cwd": ROOT, "env": environment(), "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
        try:
            if process.stdout.readline():
                return None
            return process.wait(SECONDS)
        finally:
            end(process)


def test_a_file_is_no_path_for_a_server(tmp_path):
    """At 6b62bd3: the file is gone."""
    precious = tmp_path / "thesis"
    precious.write_text("ten years of work")
    assert try_to_bind(f"ipc://{precious}") not in {None, 0}
    assert precious.read_text() == "ten years of work"


def test_a_link_leads_a_server_to_no_file(tmp_path):
    """At 6b62bd3: the link is gone, and a socket in its place."""
    precious, link = tmp_path / "thesis", tmp_path / "link"
    precious.write_text("ten years of work")
    link.symlink_to(precious)
    try_to_bind(f"ipc://{link}")
    assert precious.read_text() == "ten years of work"
    assert link.is_symlink()


def test_a_second_server_does_not_take_over_the_path_of_a_live_one(tmp_path):
    """At 6b62bd3: the second one listens, and nobody finds the first one any more."""
    endpoint = f"ipc://{tmp_path}/live"
    with servers.attacked(tmp_path, bind=endpoint) as server, Peers(server) as peers:
        assert try_to_bind(endpoint) == CANNOT_BIND
        assert isinstance(peers.open().ask(StatusRequest()), Status)


def test_the_path_of_a_dead_server_may_be_taken(tmp_path):
    """Holds at 6b62bd3, and is to go on doing so."""
    endpoint = f"ipc://{tmp_path}/dead"
    with servers.attacked(tmp_path, bind=endpoint):
        pass
    assert os.path.exists(tmp_path / "dead")  # noqa: PTH110 - a socket
    with servers.attacked(tmp_path, bind=endpoint) as server, Peers(server) as peers:
        assert isinstance(peers.open().ask(StatusRequest()), Status)


@pytest.mark.parametrize("name", ["@abstract", "@"])
def test_a_name_that_no_folder_protects_is_no_place_for_a_server(name):
    """At 62e93b8: any user of the host connects, and ends the server by four floods of PINGs that break off."""
    assert try_to_bind(f"ipc://{name}-{os.getpid()}") == WRONG_USE


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_no_place_for_a_server(mode):
    """At 62e93b8: it counts as private with a sticky bit, and clients join another user's server there in silence."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(mode)
        assert try_to_bind(f"ipc://{folder}/s") == WRONG_USE
