"""Runs programs as a second user of this host, for which the tests must run as root."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from support.paths import ROOT

# The user "nobody" of most systems, which owns no files.
NOBODY = 65_534

needs_another_user = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

# The other user may not be able to read the interpreter's files, so all imports precede the change of user.
BECOME = f"""
import os
import torch._dynamo
from client.launch import own_server
from torch.distributed import rendezvous
def be_another_user():
    os.setgroups([])
    os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
    os.chdir("/")
"""


def as_another_user(program: str, environ: Mapping[str, str]) -> list[str]:
    """Runs a program that calls `be_another_user()`; returns the lines that it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("STATSD_BN_", "XDG_"))}
    ended = subprocess.run(
        [sys.executable, "-c", BECOME + program],
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
