"""Ranks: processes of a step that form a process group on one device.

A fork server that has imported torch and the client, and has used no device, forks them. Every wait has a deadline: a
rank that does not answer in time writes its stack and is killed.
"""

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from gpu_report.child import planted
from gpu_report.step import Step

# Torch then looks for devices with NVML, and does not initialise CUDA, which would not work in forked processes.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

STARTER = multiprocessing.get_context("forkserver")

# A late rank writes its stack this long before it is killed.
LAST_WORDS_SECONDS = 2.0

# Time for the ranks to end. They do not shut down their process group, which might wait for a thread for ever.
END_SECONDS = 2.0


class RankFailed(RuntimeError):
    """A rank raised an exception, ended without a result, or did not answer in time."""


@dataclass(frozen=True)
class Rank:
    """Arguments of a rank.

    Attributes:
        number: of the rank.
        size: how many ranks there are.
        device: of all ranks.
        folder: shared by all ranks.
        seconds: the longest wait for the others.
        options: further arguments of the program.
        environment: variables to set before the program runs.
    """

    number: int
    size: int
    device: torch.device
    folder: Path
    seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def process_group(self, backend: str) -> Iterator[Any]:
        """Makes and yields torch's default process group."""
        store = distributed.FileStore(str(self.folder / "store"), self.size)
        timeout = timedelta(seconds=self.seconds)
        distributed.init_process_group(backend, store=store, rank=self.number, world_size=self.size, timeout=timeout)
        yield distributed.group.WORLD


def on_ranks(
    step: Step,
    program: Callable[[Rank], Any],
    size: int,
    *,
    seconds: float,
    environments: Sequence[Mapping[str, str]] = (),
    **options: Any,
) -> list[Any]:
    """Runs a program on each rank; returns their results in rank order.

    Args:
        step: the calling step.
        program: a function at the top level of a module. Its result is pickled.
        size: how many ranks.
        seconds: for all ranks together.
        environments: the variables of each rank.
        options: for the program.

    Raises:
        RankFailed: a rank returned no result.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="gpu-report-ranks-", ignore_cleanup_errors=True) as folder:
        ranks = [
            Rank(
                number,
                size,
                step.device,
                Path(folder),
                seconds - LAST_WORDS_SECONDS,
                options,
                environments[number] if environments else {},
            )
            for number in range(size)
        ]
        started = [_start(program, rank, step.plant) for rank in ranks]
        try:
            answers = [_answer(connection, number, deadline) for number, (_, connection) in enumerate(started)]
        finally:
            for _, connection in started:
                connection.close()
            last = time.monotonic() + END_SECONDS
            for process, _ in started:
                process.join(max(0.0, last - time.monotonic()))
                process.kill()
                process.join()
    if failures := [text for kind, text in answers if kind == "raised"]:
        raise RankFailed("\n".join(failures))
    return [pickle.loads(result) for _, result in answers]  # noqa: S301 - from our own process


def _start(program: Callable[[Rank], Any], rank: Rank, plant: str) -> tuple[Any, Connection]:
    ours, theirs = STARTER.Pipe()
    process = STARTER.Process(target=_run, args=(program, rank, plant, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(connection: Connection, number: int, deadline: float) -> tuple[str, Any]:
    try:
        if connection.poll(max(0.0, deadline - time.monotonic())):
            kind, result = connection.recv()
            return kind, f"rank {number}:\n{result}" if kind == "raised" else result
    except EOFError:
        return "raised", f"rank {number}: ended without a word"
    return "raised", f"rank {number}: expected an answer in time, got none; its stack is in the output"


def _run(program: Callable[[Rank], Any], rank: Rank, plant: str, connection: Connection) -> None:
    """Main program of a rank; the rank lives until the step has all answers, since other ranks may still need it."""
    faulthandler.dump_traceback_later(rank.seconds)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **rank.environment})
    torch.set_num_threads(1)
    try:
        with planted(plant):
            answer = "returned", pickle.dumps(program(rank))
    except BaseException:  # noqa: BLE001 - the step reports it
        answer = "raised", traceback.format_exc()
    with suppress(OSError):  # the step may have given up
        connection.send(answer)
        connection.poll(rank.seconds)  # until it is closed
    os._exit(0)
