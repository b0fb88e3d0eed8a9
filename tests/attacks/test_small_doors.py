"""The small doors: what lies in a folder, what fills a disk, and which names look local.

At 6b62bd3 most of these succeed, as each test says.
"""

import os
import subprocess
import sys

import pytest

from attacks import servers
from attacks.crowds import ask_all
from attacks.peers import Peers, job_of
from attacks.servers import ROOT, environment
from attacks.variants import long
from statsd_bn.messages import Failure, Leave, Register, Registered, Status, StatusRequest
from statsd_bn.wire import encode

USAGE = 2


def command(*arguments: str, safe: bool = True) -> list[str]:
    return [sys.executable, *(["-P"] if safe else []), "-m", "server", *arguments]


def run(*arguments: str, **given: object) -> "subprocess.CompletedProcess[str]":
    options = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True, "timeout": 30}
    return subprocess.run(command(*arguments), check=False, **{**options, **given})


@pytest.mark.parametrize("name", ["msgpack", *map(long, ("zmq", "numpy", "argparse", "secrets"))])
def test_the_server_imports_nothing_of_the_working_directory(tmp_path, name):
    """At 6b62bd3: `python -m server` runs a msgpack.py that lies there."""
    (tmp_path / f"{name}.py").write_text("raise SystemExit('a foreign module')")
    done = subprocess.run(
        command("--help", safe=False),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "a foreign module" not in done.stderr
    assert done.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_keys_are_not_made_in_a_folder_of_somebody_else(tmp_path):
    """At 6b62bd3: they are."""
    folder = tmp_path / "keys"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, 65_534, 65_534)
    assert run("keygen", str(folder)).returncode == USAGE
    assert not [*folder.rglob("*.key_secret")]


def test_keys_are_not_made_in_a_folder_that_all_may_write(tmp_path):
    """At 6b62bd3: they are."""
    folder = tmp_path / "keys"
    folder.mkdir()
    folder.chmod(0o777)
    done = run("keygen", str(folder))
    assert done.returncode == USAGE or not folder.stat().st_mode & 0o022


# So many connections may still come in before a revocation takes effect on a busy machine.
# A hundred of them may say as much as a page each.
LOG_BYTES = 100_000


def test_messages_do_not_fill_the_log(tmp_path):
    """At 6b62bd3: 100 messages write 500 kB, since a character that is not printable is written as four."""
    with servers.attacked(tmp_path, "--log-level", "info", with_keys=True) as server, Peers(server, "bob") as peers:
        peer = peers.open()
        for number in range(100):
            token, job = b"%08d" % number, job_of("bob")
            peer.ask(Register(token, job, "world", 0, 0, 1, 0, 9.0, "here"), 1.0)
            # A message that exists is sound, so this is made of a frame.
            peer.say(encode(Leave(token, "P" * 4096)).replace(b"P" * 4096, b"\x1b" * 4096))
        peer.ask(StatusRequest())
        assert server.said()
        assert len(server.said()) < LOG_BYTES


@pytest.mark.attack_long
def test_a_large_group_hides_no_other_one_in_the_status(tmp_path):
    """At 6b62bd3: a report that is too large is halved until nothing of it is left but the first groups, or none."""
    size = 5000
    with servers.attacked(tmp_path, "--silence-seconds", "3600", with_keys=True) as server, Peers(server) as peers:
        large, small = job_of("bob"), job_of("bob")
        crowd = [Register(b"%08d" % n, large, "world", 0, n, size, 0, 9.0, "p" * 256) for n in range(size - 1)]
        assert len(ask_all(peers.open(), crowd)) == size - 1
        assert isinstance(peers.open().ask(Register(b"small---", small, "world", 0, 0, 2, 0, 9.0, "here")), Registered)
        found = peers.open().ask(StatusRequest())
        assert isinstance(found, Status), isinstance(found, Failure) and found.message
        assert small in [group["job"] for group in found.report["groups"]]
