"""The four ways to train the same network on the same batches, each with what came of it."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import client
import digits
from children import Child, run_group, running_server
from training import snapshot, train

REPLICAS = 4

MEMBER = Path(__file__).with_name("train_digits.py")

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a training.

    Attributes:
        compared: the state after the first steps, when it is compared.
        final: the state at the end.
        rounds: exchanges of statistics between processes.
        median_round_trip: seconds that such an exchange took.
        seconds: that the training took, from the start of its processes to their end.
    """

    compared: digits.State
    final: digits.State
    rounds: int | None = None
    median_round_trip: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Length:
    """How many steps to train, and after how many of them to compare."""

    steps: int
    compare: int


def whole_batch(length: Length, tell: Tell) -> Trained:
    """One process sees the whole batch: what the others are measured against."""
    network = digits.network()
    return _train_here(network, network, length, tell)


def data_parallel(length: Length, tell: Tell) -> Trained:
    """Virtual replicas in the threads of one process, which meet in memory: no server."""
    network = digits.network()
    model = client.DataParallelWithCallback(client.convert_model(network), device_ids=["cpu"] * REPLICAS)
    return _train_here(model, network, length, tell)


def synchronised(length: Length, tell: Tell) -> Trained:
    """A process per replica, whose batch norms meet in a server, which runs for this training only."""
    with running_server() as (server, endpoint):
        return _train_group(length, tell, server, endpoint)


def unsynchronised(length: Length, tell: Tell) -> Trained:
    """A process per replica with torch's batch norm; the result is that of rank 0."""
    return _train_group(length, tell)


def _train_here(model: nn.Module, network: nn.Module, length: Length, tell: Tell) -> Trained:
    states = {}
    for step, _ in train(model, length.steps):
        if step in {length.compare, length.steps}:
            states[step] = snapshot(network)
        tell(step)
    return Trained(states[length.compare], states[length.steps])


def _train_group(length: Length, tell: Tell, server: Child | None = None, endpoint: str = "") -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved.pt"
        arguments = [str(MEMBER), "--steps", str(length.steps), "--keep", str(length.compare), "--save", str(saved)]
        # Meeting in a file leaves no port for another program to take first.
        arguments += ["--init-method", f"file://{folder}/meeting"]
        arguments += [] if server else ["--no-synchronise"]
        group = {"WORLD_SIZE": str(REPLICAS), "STATSD_BN_ENDPOINT": endpoint, "STATSD_BN_JOB": "digits"}
        run_group(arguments, [{**group, "RANK": str(rank)} for rank in range(REPLICAS)], _steps(tell), server)
        result = torch.load(saved, weights_only=True)
    states = result.pop("states")
    return Trained(states[length.compare], states[length.steps], **result)


def _steps(tell: Tell) -> Callable[[str], None]:
    """Returns what reads the steps out of a member's lines."""

    def read(line: str) -> None:
        if found := re.match(r"step (\d+) of", line):
            tell(int(found[1]))

    return read
