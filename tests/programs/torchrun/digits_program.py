"""examples/train_digits.py under torchrun, in the middle of whose training somebody is killed.

    torchrun digits_program.py WHO [OPTION ...]

WHO is "server", the one of rank 0, or "worker": rank 1, the first time that it is started. Whoever kills from outside
may come too late, when the training is over.
"""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

from support.own_server import kill_own_server
from support.paths import ROOT

EXAMPLES = ROOT / "examples"

# Before the step whose state is compared.
KILLED_AFTER = 11

sys.path.insert(0, str(EXAMPLES))

import training  # noqa: E402 - it lies with the examples

train = training.train

WHO = sys.argv.pop(1)


def interrupted(*arguments: Any) -> Iterator[tuple[int, float]]:
    """The training, until somebody is killed, and what comes after it."""
    for step, loss in train(*arguments):
        if step == KILLED_AFTER:
            kill()
        yield step, loss


def kill() -> None:
    if WHO == "server":
        kill_own_server()
    elif (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    training.train = interrupted
    runpy.run_path(str(EXAMPLES / "train_digits.py"), run_name="__main__")
