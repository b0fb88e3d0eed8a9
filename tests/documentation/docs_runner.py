"""Runs Python blocks of the documentation, each in a fork of a process that has imported torch."""

import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from torch import distributed

import client
from support.starter import STARTER
from zoo.libraries import library

FORK = multiprocessing.get_context("fork")
SECONDS = 30.0


@dataclass(frozen=True)
class Run:
    page: str  # for tracebacks
    line: int  # for tracebacks
    text: str
    folder: str  # working directory
    environs: Sequence[Mapping[str, str]]  # additions to this process's environment


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run; `codes` are the processes' exit codes, None after a timeout."""

    codes: Sequence[int | None]
    output: str


class Runner:
    """The process that forks; leaving the `with` block ends it."""

    def __enter__(self) -> Self:
        self._pipe, theirs = STARTER.Pipe()
        self._process = STARTER.Process(target=_serve, args=(theirs,))
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def run(self, task: Run) -> Outcome:
        self._pipe.send(task)
        return self._pipe.recv()


def _serve(pipe: Connection) -> None:
    if importlib.util.find_spec("torchvision"):
        library("torchvision")  # later imports need no operators, which may be missing
    while True:
        task = pipe.recv()
        if "lightning" in task.text:
            import client.integrations.lightning  # noqa: F401, PLC0415 - takes seconds, so once for all that need it
        pipe.send(run(task))


def run(task: Run) -> Outcome:
    log = Path(task.folder) / "output"
    processes = [FORK.Process(target=_play, args=(task, environ, log)) for environ in task.environs]
    for process in processes:
        process.start()
    _wait_for(processes)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return Outcome(codes, log.read_text())


def _wait_for(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Waits until all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + SECONDS
    running = list(processes)
    while running and time.monotonic() < deadline:
        wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic()))
        running = [process for process in running if process.exitcode is None]
        if any(process.exitcode for process in processes):
            # The others have a moment to report the failure.
            deadline = min(deadline, time.monotonic() + 2.0)


def _play(task: Run, environ: Mapping[str, str], log: Path) -> None:
    os.environ.update(environ)
    os.chdir(task.folder)
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    # Deleting a DDP model after its gloo process group can block for ever, so `names` keeps it until `os._exit`.
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        _execute(task, names)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is shown
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(task: Run, names: dict[str, Any]) -> None:
    from documentation import docs_stand_ins  # noqa: PLC0415 - it reads the environment of this process

    names |= docs_stand_ins.names(task.text)
    if "DistributedDataParallel(" in task.text and "init_process_group" not in task.text:
        distributed.init_process_group("gloo")
    # Empty lines before the block make the line numbers in a traceback the same as on the page.
    code = compile("\n" * (task.line - 1) + task.text, task.page, "exec")
    try:
        exec(code, names)  # noqa: S102 - a block of the documentation
    except docs_stand_ins.ReplicaLost as error:
        if error is not docs_stand_ins.lost:
            raise
    client.disconnect()
    if distributed.is_initialized():
        distributed.barrier()
