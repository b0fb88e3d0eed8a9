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
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LIBRARY = "libsbn.so"
COMPILERS = ("cc", "gcc", "clang")
NO_COMPILER = f"no C compiler: looked for CC, {', '.join(COMPILERS)}"

# No contraction to fused multiply-adds: sums and statistics must have numpy's bits on every processor.
FLAGS = shlex.split(
    "-std=gnu11 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off -fvisibility=hidden -fPIC -shared -pthread "
    "-Wno-psabi"
)

# Seconds until a compiler counts as hung; an emulated one takes a minute.
TIMEOUT = 600


class Compiled(NamedTuple):
    """Result of a compilation."""

    path: Path | None
    reason: str = ""  # why there is no library


def compile_core(folder: Path = HERE, variables: Mapping[str, str] = os.environ) -> Compiled:
    """Compile the core into a folder and replace the library there; after a failure the folder has no library.

    `variables` is the environment: CC gives the compiler and its arguments; without CC, PATH is searched.
    """
    target = folder / LIBRARY
    sources = sorted(map(str, (HERE / "core").glob("*.c")))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        built = Path(scratch) / LIBRARY
        compiler = _compiler(variables)
        reason = _run([*compiler, *FLAGS, "-o", str(built), *sources, "-lm"], variables) if compiler else NO_COMPILER
        if not reason:
            built.replace(target)  # atomically: another process may be loading it
            return Compiled(target)
    target.unlink(missing_ok=True)  # it was built from other sources
    return Compiled(None, reason)


def _compiler(variables: Mapping[str, str]) -> list[str]:
    named = shlex.split(variables["CC"]) if "CC" in variables else []
    if named:
        return named
    paths = (shutil.which(name, path=variables.get("PATH", os.defpath)) for name in COMPILERS)
    return next(([path] for path in paths if path), [])


def _run(command: list[str], variables: Mapping[str, str]) -> str:
    """The reason why a command failed, or an empty text."""
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that the user has named or installed
            command, env=dict(variables), capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if not done.returncode:
        return ""
    lines = (done.stderr.strip() or "no message").splitlines()
    first = next((line for line in lines if "error" in line), lines[-1])
    return f"{command[0]} ended with {done.returncode}: {first:.200}"


if __name__ == "__main__":
    result = compile_core()
    print(result.path or f"The native core is not compiled ({result.reason}); torch is used instead.")  # noqa: T201
    sys.exit(not result.path)
