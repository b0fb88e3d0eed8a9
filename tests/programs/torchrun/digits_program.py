"""examples/train_digits.py under torchrun; WHO is killed: "server" or "worker", rank 1 in its first life."""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

from support.own_server import kill_own_server
from support.paths import ROOT

EXAMPLES = ROOT / "examples"

# After this step; the compared state is that after the next one.
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
