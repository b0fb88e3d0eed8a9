"""Four ways to train the same network on the same batches, and their results."""

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

OnStep = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training.

    Attributes:
        compared: state after the first steps, for the comparison.
        final: state at the end.
        rounds: exchanges of statistics between processes.
        median_round_trip: duration of an exchange, in seconds.
        seconds: duration of the training, with the start of its processes.
    """

    compared: digits.State
    final: digits.State
    rounds: int | None = None
    median_round_trip: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Length:
    """Number of training steps, and number of steps after which states are compared."""

    steps: int
    compare: int


def whole_batch(length: Length, on_step: OnStep) -> Trained:
    """One process with the whole batch: the reference."""
    network = digits.network()
    return _train_here(network, network, length, on_step)


def data_parallel(length: Length, on_step: OnStep) -> Trained:
    """Virtual replicas in threads of one process, without a server."""
    network = digits.network()
    model = client.DataParallelWithCallback(client.convert_model(network), device_ids=["cpu"] * REPLICAS)
    return _train_here(model, network, length, on_step)


def synchronised(length: Length, on_step: OnStep) -> Trained:
    """A process per replica, synchronised over a server that runs for this training only."""
    with running_server() as (server, endpoint):
        return _train_group(length, on_step, server, endpoint)


def unsynchronised(length: Length, on_step: OnStep) -> Trained:
    """A process per replica with torch's batch norm; returns rank 0's result."""
    return _train_group(length, on_step)


def _train_here(model: nn.Module, network: nn.Module, length: Length, on_step: OnStep) -> Trained:
    states = {}
    for step, _ in train(model, length.steps):
        if step in {length.compare, length.steps}:
            states[step] = snapshot(network)
        on_step(step)
    return Trained(states[length.compare], states[length.steps])


def _train_group(length: Length, on_step: OnStep, server: Child | None = None, endpoint: str = "") -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved.pt"
        arguments = [str(MEMBER), "--steps", str(length.steps), "--keep", str(length.compare), "--save", str(saved)]
        # A file as rendezvous needs no port, which another program could take.
        arguments += ["--init-method", f"file://{folder}/meeting"]
        arguments += [] if server else ["--no-synchronise"]
        group = {"WORLD_SIZE": str(REPLICAS), "STATSD_BN_ENDPOINT": endpoint, "STATSD_BN_JOB": "digits"}
        run_group(arguments, [{**group, "RANK": str(rank)} for rank in range(REPLICAS)], _steps(on_step), server)
        result = torch.load(saved, weights_only=True)
    states = result.pop("states")
    return Trained(states[length.compare], states[length.steps], **result)


def _steps(on_step: OnStep) -> Callable[[str], None]:
    """Returns a parser of a member's output that calls `on_step`."""

    def read(line: str) -> None:
        if found := re.match(r"step (\d+) of", line):
            on_step(int(found[1]))

    return read
