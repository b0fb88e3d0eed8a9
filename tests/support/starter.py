"""Starter: test processes come from one that has loaded torch, its compiler and ours, so in milliseconds, not seconds.

Nothing is inherited from whoever starts them but what the environment was when the first one began. Their random
numbers begin alike.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTER = multiprocessing.get_context("forkserver")

# With the first optimizer of a process torch loads the compiler, and so does `client.connect`; its back half it loads
# with the first call that is compiled, which takes more than a second.
STARTER.set_forkserver_preload(["client", "torch._dynamo", "torch._inductor.compile_fx", "conftest", "support.frozen"])

WAIT_SECONDS = 100.0


def warm_up() -> None:
    """Starts what starts the processes, so that nobody's time begins with that; it lives as long as this process."""
    process = STARTER.Process(target=int)
    process.start()
    process.join(WAIT_SECONDS)


def run_script(path: Path, arguments: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
    """Runs a script in a process of the starter as Python would; what it prints goes to a file."""
    os.environ.update(environ)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    runpy.run_path(str(path), run_name="__main__")
