"""What ranks do in `test_watched_process_group.py`: a connection, and rows over torch's default process group."""

import math
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import client
from programs.member_programs import state
from server.cli.status import ask
from statsd_bn.errors import StatsdBNError
from support.sentences import client_log, error_of

STEPS, SECONDS, LATE_SECONDS = 4, 20.0, 3.5


def _model() -> nn.Module:
    torch.manual_seed(0)
    return client.convert_model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)))


def _samples(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def train_and_ask(connection: client.Connection) -> tuple[str, int, int, dict[str, Any]]:
    """Transport, rounds, step, and on rank 0 the server's report; rank 1 sends infinity in the last step."""
    model, x = _model(), _samples(connection.rank)
    for _ in range(STEPS):
        model(x).square().sum().backward()
    model(torch.full((4, 3), math.inf if connection.rank == 1 else 1.0))
    until, report = time.monotonic() + SECONDS, {}
    while connection.rank == 0 and time.monotonic() < until and not _is_complete(report):
        time.sleep(0.05)
        (report,) = (one for one in ask(connection.endpoint)["groups"] if one["job"] == connection.member.job)
    distributed.barrier()
    return connection.transport, connection.rounds, connection.session(None).steps.step, report


def _is_complete(report: dict[str, Any]) -> bool:
    members = report.get("members", ())
    return bool(report.get("non_finite")) and all("transport" in one and one.get("step", 0) >= STEPS for one in members)


def checkpointed(connection: client.Connection) -> dict[str, Any]:
    """The first step's checkpoint recomputes its layer after the negotiation of the transport; returns the buffers."""
    model = _model()
    checkpoint(model, _samples(connection.rank).requires_grad_(), use_reentrant=False).square().sum().backward()
    return state(model)


def first_error(connection: client.Connection) -> str:
    return error_of(_model(), _samples(connection.rank))


def first_error_over(endpoint: str, job: str, rank: int, transport: str) -> str:
    """Returns the error of the first call of a rank that asks for a transport and has no process group."""
    with client.connect(endpoint, job=job, rank=rank, world_size=2, transport=transport) as connection:
        return first_error(connection)


def in_another_order(rank: Any, endpoint: str, job: str) -> str:
    """Ranks have other numbers in the job than in the process group; returns the error of the first call."""
    who = {"job": job, "rank": 1 - rank.rank, "world_size": 2, "transport": "process_group"}
    with client.connect(endpoint, **who) as connection:
        return first_error(connection)


def be_late(connection: client.Connection) -> list[str]:
    """Rank 1 is late; returns the warnings of this rank."""
    model, x = _model(), _samples(connection.rank)
    model(x)
    with client_log() as lines:
        if connection.rank == 1:
            time.sleep(LATE_SECONDS)
        model(x)
    return [text for _, text in lines]


def come_to_different_layers(connection: client.Connection) -> str:
    """The ranks call different layers after a common step; returns the error, which the server detects."""
    model, x = _model(), _samples(connection.rank)
    model(x)
    return error_of(model[2 * connection.rank], x)


def join(connection: client.Connection) -> tuple[str, str, list[float]]:
    """The first rank has one batch more; returns the transport before and after, and the outcome."""
    model, x = _model(), _samples(connection.rank)
    model(x)
    before = connection.transport
    try:
        with client.join(model):
            for _ in range(2 - connection.rank):
                output = model(x)
    except StatsdBNError as error:
        return before, connection.transport, str(error)
    return before, connection.transport, output.isfinite().all().item()


def freeze(endpoint: str, job: str, store: str, rank: int) -> None:
    """A script in which rank 1 freezes while rank 0 waits for it."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    client.connect(endpoint, job=job, rank=rank, world_size=2, transport="process_group")
    model, x = _model(), _samples(rank)
    model(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(x)


if __name__ == "__main__":
    freeze(*sys.argv[1:4], int(sys.argv[4]))
