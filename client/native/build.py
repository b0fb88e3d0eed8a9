"""Compiler of the native core: for wheels and editable installs, and `python client/native/build.py` in a clone.

Only the standard library is imported, because a build hook runs this before anything is installed.
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

# Without contraction, so that sums and statistics have the same bits on every processor and those of numpy.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wno-psabi",
)

# Of a compiler that hangs, in seconds; an emulated one takes a minute.
TIMEOUT = 600


class Compiled(NamedTuple):
    """What came of it.

    Attributes:
        path: the library; None if it could not be compiled.
        reason: why it could not.
    """

    path: Path | None
    reason: str = ""


def compile_core(folder: Path = HERE, variables: Mapping[str, str] = os.environ) -> Compiled:
    """Compiles the core into a folder, in place of a library that is there; after a failure none is there.

    Args:
        folder: where the library goes; the sources are beside this file.
        variables: the environment, whose CC may name the compiler, maybe with arguments; else its PATH is searched for
            cc, gcc and clang.
    """
    target = folder / LIBRARY
    sources = sorted(map(str, (HERE / "core").glob("*.c")))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        made = Path(scratch) / LIBRARY
        compiler = _compiler(variables)
        reason = _run([*compiler, *FLAGS, "-o", str(made), *sources, "-lm"], variables) if compiler else NO_COMPILER
        if not reason:
            made.replace(target)  # at once, for a process that loads it meanwhile
            return Compiled(target)
    target.unlink(missing_ok=True)  # of other sources
    return Compiled(None, reason)


def _compiler(variables: Mapping[str, str]) -> list[str]:
    named = shlex.split(variables["CC"]) if "CC" in variables else []
    if named:
        return named
    found = (shutil.which(name, path=variables.get("PATH", os.defpath)) for name in COMPILERS)
    return next(([path] for path in found if path), [])


def _run(command: list[str], variables: Mapping[str, str]) -> str:
    """Returns why a command failed; nothing if it did not."""
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that the user has named or installed
            command, env=dict(variables), capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if not done.returncode:
        return ""
    last = (done.stderr.strip() or "no message").splitlines()
    first = next((line for line in last if "error" in line), last[-1])
    return f"{command[0]} ended with {done.returncode}: {first:.200}"


if __name__ == "__main__":
    result = compile_core()
    print(result.path or f"The native core is not compiled ({result.reason}); torch computes in its place.")  # noqa: T201
    sys.exit(not result.path)
