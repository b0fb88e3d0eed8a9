"""Keeps `python -m server` from importing files of the working directory instead of libraries.

Python searches the working directory first, so the command would run a `msgpack.py` that it finds there. Importing the
package from a program leaves the search path unchanged. This module must be imported before any library.
"""

import os
import sys


def leave_working_directory() -> None:
    """Removes the working directory from the search path if Python added it for `-m server`.

    A clone of this project stays on the path, so that all three packages have the same version.
    """
    if not _is_started_by_name() or sys.flags.safe_path or not sys.path:
        return
    of_packages = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 - pathlib is a file too
    if os.path.realpath(sys.path[0]) != of_packages:
        del sys.path[0]


def _is_started_by_name() -> bool:
    """Whether this is `python -m server`: the first argument is `-m` until Python has found the package."""
    told = sys.orig_argv
    return sys.argv[:1] == ["-m"] and any(
        argument == "-mserver" or told[place : place + 2] == ["-m", "server"] for place, argument in enumerate(told)
    )


leave_working_directory()
