"""Member processes of the chaos tests: they train real layers, and get stuck on demand."""

import hashlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch
from torch import nn

import client
from support.memory_members import outcome

# Maximum wait of a member for a message of its parent.
MESSAGE_SECONDS = 120.0

# Far longer than any wait for a stuck member, and still bounded.
STUCK_SECONDS = 60

# Members arrive at their rounds in changing order.
PAUSE_SECONDS = 0.004

READY = "ready"


@dataclass(frozen=True)
class Part:
    endpoint: str
    job: str
    member: int
    world_size: int
    deadline: float
    steps: int
    trouble: str = ""  # a key of `TROUBLES`, or empty
    trouble_step: int = 0


@dataclass(frozen=True)
class Report:
    """How a member's run ended: a digest of its weights and buffers or an exception, and when by the common clock."""

    what: Any
    at: float


def loop() -> None:
    end = time.monotonic() + STUCK_SECONDS
    while time.monotonic() < end:
        pass


def fail() -> None:
    raise ValueError("this member fails")


TROUBLES: dict[str, Callable[[], None]] = {trouble.__name__: trouble for trouble in (loop, fail)}


def take_part(part: Part, pipe: Pipe, progress: Any) -> None:
    """Connect, send `READY`, train the allowed steps (counted in `progress`), send a `Report`, and wait for release."""

    def run() -> Any:
        os.environ["STATSD_BN_INSECURE"] = "1"  # the proxies' doors are plain TCP
        with client.connect(
            part.endpoint, job=part.job, rank=part.member, world_size=part.world_size, round_timeout=part.deadline
        ):
            pipe.send(READY)
            pipe.send(Report(outcome(lambda: train(part, pipe, progress)), time.monotonic()))
            _receive(pipe)

    error = outcome(run)
    if isinstance(error, Exception):
        pipe.send(Report(error, time.monotonic()))
        _receive(pipe)


def train(part: Part, pipe: Pipe, progress: Any) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    client.convert_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(part.member)
    chance = random.Random(part.member)
    allowed = 0
    for step in range(part.steps):
        while allowed <= step:
            allowed += _receive(pipe)
        if part.trouble and step == part.trouble_step:
            TROUBLES[part.trouble]()
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - torch.sin(x[:, :3])).square().mean().backward()
        optimizer.step()
        progress.value = step + 1
        time.sleep(chance.uniform(0, PAUSE_SECONDS))
    return digest_of(model)


def digest_of(model: nn.Module) -> str:
    """The digest of the state; raises on NaN, since all members that ended with NaN would have equal digests."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if not value.isfinite().all():
            raise ValueError(f"{name}: expected finite values, got {value}")
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def _receive(pipe: Pipe) -> int:
    """The parent's next message; ends the member if the parent has ended."""
    if not pipe.poll(MESSAGE_SECONDS):
        raise TimeoutError(f"no message within {MESSAGE_SECONDS:g} s")
    message: int = pipe.recv()
    return message


def train_through_restarts(
    endpoint: str, job: str, member: int, world_size: int, steps: int, pause: float, transport: str
) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    client.convert_model(model)
    model[1].group = client.Group(f"half {member // 2}", 2 if member < 2 else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(member)
    with client.connect(endpoint, job=job, rank=member, world_size=world_size, round_timeout=60.0, transport=transport):
        for _ in range(steps):
            x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            ((model(x) - x[:, :3]) ** 2).mean().backward()
            optimizer.step()
            time.sleep(pause * (1 + member))
    return digest_of(model)
