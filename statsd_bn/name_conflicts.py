"""The command `statsd-bn`, which finds the right `server` among modules of that name.

It has the commands of `python -m server`. But `server` is a common name: a `server.py` on PYTHONPATH would start
instead of ours. So the command starts in this package, which has a unique name, and imports the `server` beside it.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from runpy import run_path

from statsd_bn.errors import ConfigurationError

PACKAGES = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the server's command line, or print its help if there are no arguments; returns the exit code."""
    sys.path.insert(0, str(PACKAGES))
    try:
        code: int = import_module("server.__main__").main(sys.argv[1:] or ["--help"])
    finally:  # argparse leaves by SystemExit
        if sys.argv[1:] == ["--version"]:
            print(describe_native_core(), *describe_modules(), sep="\n")  # noqa: T201 - the command's answer
    return code


def describe_modules(*, with_paths: bool = True) -> Iterator[str]:
    """Which `client` and `server` a script in the working directory imports: a line for each."""
    for name in ("client", "server"):
        spec = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found and found.parent == PACKAGES / name:
            yield f"{name}: statsd_bn's"
        elif spec is None:
            yield f"{name}: not found"
        else:
            path = f", {found or 'a folder without an __init__.py'}" if with_paths else ""
            yield f"{name}: another module{path}, which hides statsd_bn's; rename it or start elsewhere"


def describe_native_core() -> str:
    """Returns a line on whether the native core is in use; loads only `library.py`, because `client` imports torch."""
    functions = run_path(str(PACKAGES / "client" / "native" / "library.py"))
    try:
        text: str = functions["description"]()
    except ConfigurationError as error:
        text = f"native core: not in use, {error}"
    return text
