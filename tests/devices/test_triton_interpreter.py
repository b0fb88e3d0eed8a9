"""Triton's kernels without a GPU: the tests of `tests/gpu/test_triton.py` in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOO_OLD = find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) < (3, 7)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheels for this platform")
@pytest.mark.skipif(TOO_OLD, reason="before Triton 3.7 the interpreter fails with NumPy 2.4; before 3.4 no kernel runs")
@pytest.mark.slow
def test_the_kernels_pass_in_tritons_interpreter():
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
