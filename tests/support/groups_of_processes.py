"""Runs a program that starts processes of its own, so that it ends with all of them, whatever happens."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SECONDS = 100.0


def run_to_its_end(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """Returns what it has printed; fails if it does not end well and in time."""
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output
