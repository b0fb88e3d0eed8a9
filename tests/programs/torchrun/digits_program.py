"""examples/train_digits.py under torchrun, with a kill of WHO: "server", or "worker", which is rank 1 at first."""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

from support.own_server import kill_own_server
from support.paths import ROOT

EXAMPLES = ROOT / "examples"

# The kill comes after this step; the test compares the state after the next step.
KILLED_AFTER = 11

sys.path.insert(0, str(EXAMPLES))

import training  # noqa: E402 - in examples/

train = training.train

WHO = sys.argv.pop(1)


def interrupted(*arguments: Any) -> Iterator[tuple[int, float]]:
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
