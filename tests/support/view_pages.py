"""The command `view` in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.paths import ROOT


@contextmanager
def view_page(
    *arguments: str, host: str = "127.0.0.1", token: str = "", **options: Any
) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Serves the page; returns the process, and the port and the token in the link that it prints."""
    command = [sys.executable, "-m", "server", "view", *arguments, "--http", f"{host}:0"]
    environ = {**os.environ, "STATSD_BN_VIEW_TOKEN": token}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            link = process.stderr.readline()
            found = re.fullmatch(rf"statsd_bn view: http://{re.escape(host)}:(\d+)/\?token=(\S+)\n", link)
            assert found, link
            yield process, int(found[1]), found[2]
        finally:
            process.kill()
