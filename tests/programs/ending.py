"""How a program of a test ends that has used gloo."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def end_without_teardown(main: Callable[[Path], None]) -> None:
    """Calls `main` with the folder on the command line, and ends. Gloo may abort a teardown (pytorch#190489)."""
    code = 0
    try:
        main(Path(sys.argv[1]))
    except Exception:  # noqa: BLE001 - whatever it is, it is shown
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
