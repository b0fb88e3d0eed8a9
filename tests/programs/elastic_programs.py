"""What the member processes of an elastic job do in `test_elastic.py`: a step of training for each word from a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

import client
from support.starter import STARTER

WAIT_SECONDS = 60.0


@dataclass
class Process:
    """A member process and the way to it."""

    process: BaseProcess
    pipe: Pipe

    def answer(self) -> Any:
        assert self.pipe.poll(WAIT_SECONDS), "no answer from the member"
        return self.pipe.recv()


@contextmanager
def started(endpoint: str, job: str, member: int, world_size: int) -> Iterator[Process]:
    """Runs a member as long as the block."""
    pipe, theirs = STARTER.Pipe()
    process = STARTER.Process(target=_train, args=(theirs, endpoint, job, member, world_size))
    process.start()
    theirs.close()
    try:
        yield Process(process, pipe)
    finally:
        pipe.close()
        process.join(WAIT_SECONDS)
        process.kill()
        process.join()


def connected(*members: Process) -> None:
    """Waits until they take part."""
    assert [member.answer() for member in members] == ["connected"] * len(members)


def step(members: list[Process]) -> list[tuple[list[int], int]]:
    """Lets members take a step; returns for each whom its last round covers, and its first step."""
    for member in members:
        member.pipe.send("step")
    return [member.answer() for member in members]


def weights(members: list[Process]) -> list[bytes]:
    """Returns the bits of all weights and buffers of each member."""
    for member in members:
        member.pipe.send("weights")
    return [member.answer() for member in members]


def kill(member: Process) -> None:
    """Ends a member without a word."""
    member.process.kill()
    member.process.join(WAIT_SECONDS)


def _train(pipe: Pipe, endpoint: str, job: str, member: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = client.convert_model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).double()
    generator = torch.Generator().manual_seed(member)
    given = {"job": job, "rank": member, "world_size": world_size, "policy": "elastic", "min_members": 2}
    with client.connect(endpoint, round_timeout=50.0, **given) as connection:
        pipe.send("connected")
        while (command := _next(pipe)) is not None:
            if command == "step":
                x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
                (model(x) ** 3).sum().backward()
                pipe.send((connection.members, connection.first_step))
            else:
                pipe.send(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))


def _next(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None
