"""Runs a program that starts processes of its own, so that it ends with all of them, whatever happens."""

import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.launched import MARK, kill_all

SECONDS = 100.0


def run_to_its_end(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """Returns what it has printed; fails if it does not end well and in time."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env={**environ, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            kill_all(mark)  # ranks of torchrun have sessions of their own
    assert process.returncode == 0, output
    return output
