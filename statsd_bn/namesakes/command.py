"""The command `statsd-bn`: `python -m server` under a name that no file of the user's can take.

`server` is a common name. A `server.py` on PYTHONPATH, or another project's package, would be started instead of ours.
So the command begins in this package, which has a name of its own, and takes the `server` that lies beside it. It names
that package only when it runs: nothing in `statsd_bn` is built on the server.
"""

import sys
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

from statsd_bn.errors import ConfigurationError

PACKAGES = Path(__file__).resolve().parents[2]

# As for any wrong setting of the command.
USAGE_ERROR = 2


def main() -> int:
    """Run the server's command line, or print its help if there are no arguments; returns the exit code."""
    sys.path.insert(0, str(PACKAGES))
    found: Any = import_module("server")
    place = getattr(found, "__file__", None) or "a folder without an __init__.py"
    if not Path(place).resolve().is_relative_to(PACKAGES):
        print(  # noqa: T201 - the command's one-line error
            f"statsd_bn: the module 'server' is not ours but {place}; it was imported before this command began. "
            "Remove it from PYTHONPATH, or rename it",
            file=sys.stderr,
        )
        return USAGE_ERROR
    try:
        code: int = import_module("server.__main__").main(sys.argv[1:] or ["--help"])
    finally:  # argparse leaves by SystemExit
        if sys.argv[1:] == ["--version"]:
            print(_native_core())  # noqa: T201 - the command's answer
    return code


def _native_core() -> str:
    """Says whether the client's native core is in use; loads that file alone, because its package imports torch."""
    functions = run_path(str(PACKAGES / "client" / "native" / "library.py"))
    try:
        said: str = functions["description"]()
    except ConfigurationError as error:
        said = f"native core: not in use, {error}"
    return said
