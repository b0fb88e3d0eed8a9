"""Keeps `python -m server` from taking a file of the working directory for one of the libraries that it needs.

Python looks there first, so a `msgpack.py` that lies in a folder where somebody types the command would be run. Whoever
imports this package keeps the search path as it is. It has to be imported before any library.
"""

import os
import sys


def leave_working_directory() -> None:
    """Takes the working directory from the search path, if Python put it there for `-m server`.

    A clone of this project that one works in is kept: the packages beside this one are to be of the same version.
    """
    if not _is_started_by_name() or sys.flags.safe_path or not sys.path:
        return
    of_packages = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 - pathlib is a file too
    if os.path.realpath(sys.path[0]) != of_packages:
        del sys.path[0]


def _is_started_by_name() -> bool:
    """Whether this is `python -m server`: while Python looks for the package, the first argument is still `-m`."""
    told = sys.orig_argv
    return sys.argv[:1] == ["-m"] and any(
        argument == "-mserver" or told[place : place + 2] == ["-m", "server"] for place, argument in enumerate(told)
    )


leave_working_directory()
