"""Triton's kernels without a GPU: the tests of `tests/gpu/test_triton.py` in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheels for this platform")
@pytest.mark.slow
def test_in_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "tests/gpu/pytest.ini",
        "tests/gpu/test_triton.py",
        "-q",
        "-n",
        "0",
    ]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
