"""Another user of the same host neither finds nor joins a server with default settings."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks.servers import ROOT, end, environment

# The user "nobody" of all tested systems.
OTHER = 65_534

pytestmark = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to be another user")

# All imports precede the change of user, since the other user may be unable to read the checkout.
INTRUDER = f"""
import os, sys, zmq
from statsd_bn.messages import Register, Registered, StatusRequest
from statsd_bn.wire import decode, encode
os.setgroups([])
os.setgid({OTHER})
os.setuid({OTHER})
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.linger = 0
dealer.connect(sys.argv[1])
dealer.send(encode(Register(b"intruder", "default", "world", 2**48 - 1, 0, 2, 0, 9.0, "intruder")))
print(type(decode(dealer.recv())).__name__ if dealer.poll(3000) else "no answer")
context.destroy(linger=0)
"""

# The owner's script without any setting, then the other user's, in a job of one rank and of two. Each runs in a fork of
# a process that has imported torch.
SCRIPT = f"""
import os
import client, client.session.connection, client.launch.server_process, client.launch.own_server
from statsd_bn.errors import StatsdBNError
for who, ranks in (("me", 1), ("another", 1), ("another", 2)):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    if who == "another":
        os.setgroups([])
        os.setgid({OTHER})
        os.setuid({OTHER})
    try:
        with client.connect(rank=0, world_size=ranks) as connection:
            print("joined", connection, flush=True)
    except StatsdBNError as error:
        print("refused", str(error).splitlines()[0], flush=True)
    break
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home that other users may enter, as on many hosts, and in it a folder like /tmp, to which all may write."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def own_environment(home: Path, **more: str) -> dict[str, str]:
    variables = {name: value for name, value in environment(**more).items() if name != "XDG_RUNTIME_DIR"}
    return {**variables, "HOME": str(home), "TMPDIR": str(home / "tmp")}


@pytest.fixture
def default_server(home) -> Iterator[str]:
    """The endpoint of a server with no option."""
    command = [sys.executable, "-P", "-m", "server"]
    options = {"cwd": ROOT, "env": own_environment(home), "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            end(process)


def run(program: str, *arguments: str, home: Path) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=own_environment(home), capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout or done.stderr


def test_a_server_without_options_does_not_answer_another_user(default_server, home):
    assert "Registered" not in run(INTRUDER, default_server, home=home)


def test_a_script_with_nothing_configured_joins_its_own_users_server_only(default_server, home):
    assert default_server
    mine, alone, refused = run(SCRIPT, home=home).splitlines()
    assert mine.startswith("joined <Connection to ipc://")
    assert alone.startswith("joined <Connection in process: ")
    assert refused.startswith("refused no server of this user (uid ")
