"""Compilation of the native core, for wheels, editable installs, and clones (`python client/native/build.py`).

It imports the standard library only, because a build hook runs it before anything is installed.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libsbn.so"
COMPILERS = ("cc", "gcc", "clang")
NO_COMPILER = f"no C compiler: looked for CC, {', '.join(COMPILERS)}"

# No contraction to fused multiply-adds: sums and statistics must have numpy's bits on every processor.
FLAGS = shlex.split(
    "-std=gnu11 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off -fvisibility=hidden -fPIC -shared -pthread "
    "-Wno-psabi"
)

# Seconds until a compiler counts as hung; an emulated compiler takes a minute.
TIMEOUT = 600


def compile_core(folder: Path = HERE, variables: Mapping[str, str] = os.environ) -> str:
    """Compile the core into a folder and replace the library there; return why that failed, or an empty text.

    `variables` is the environment: CC gives the compiler and its arguments; without CC, PATH is searched.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        built = Path(scratch) / LIBRARY
        if reason := _compile(built, variables):
            (folder / LIBRARY).unlink(missing_ok=True)  # the old library was built from other sources
        else:
            built.replace(folder / LIBRARY)  # atomically: another process may be loading it
    return reason


def _compile(library: Path, variables: Mapping[str, str]) -> str:
    """Compile a library; return the reason why that failed, or an empty text."""
    paths = (shutil.which(name, path=variables.get("PATH", os.defpath)) for name in COMPILERS)
    compiler = shlex.split(variables.get("CC", "")) or next(([path] for path in paths if path), [])
    if not compiler:
        return NO_COMPILER
    command = [*compiler, *FLAGS, "-o", str(library), *sorted(map(str, (HERE / "core").glob("*.c"))), "-lm"]
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that the user has named or installed
            command, env=dict(variables), capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler[0]}: {error}"
    if not done.returncode:
        return ""
    lines = (done.stderr.strip() or "no message").splitlines()
    first = next((line for line in lines if "error" in line), lines[-1])
    return f"{compiler[0]} ended with {done.returncode}: {first:.200}"


if __name__ == "__main__":
    reason = compile_core()
    print(f"The native core is not compiled ({reason}); torch is used instead." if reason else HERE / LIBRARY)  # noqa: T201
    sys.exit(bool(reason))
