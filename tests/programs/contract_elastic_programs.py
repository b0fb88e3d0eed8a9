"""The members of the contract's elastic job, and the same training in one process.

Of three members one leaves between two commits, which undoes the work since the commit; then a newcomer joins.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import client
from statsd_bn import Rows

SECONDS = 100.0
PAUSE_SECONDS = 0.01

WORLD_SIZE = 3
LEAVER, NEWCOMER = 2, 3

# With these numbers all members have equally many batches, whenever the newcomer joins; last batches differ in size.
SAMPLES, BATCH, COMMIT_EVERY = 50, 3, 3

# Commits are after the batches 3 and 6 of an epoch.
LEAVES_AFTER_STEPS = 5
EPOCHS_WITH_NEWCOMER = 2
ENDLESS = 10**6


@dataclass(frozen=True)
class Step:
    """One step of a member, as `connection.members` and an aggregate describe it."""

    epoch: int
    own: list[int]
    members: list[int]
    replicas: int
    samples: int
    averaged_over: int


@dataclass
class Life:
    """A member's record: its steps that were not undone, the changes of membership, and its final state."""

    rank: int
    first_step: int = 0
    steps: dict[int, Step] = field(default_factory=dict)
    undone: int = 0
    changes: list[tuple[list[int], list[int]]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


class Leaves(Exception):
    """This member leaves the job."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, samples: Tensor) -> Tensor:
    x = samples.double()
    targets = torch.cos(0.3 * x)
    return (model(torch.stack([x.sin(), x.cos(), x / SAMPLES], dim=1)).squeeze(1) - targets).square().sum()


def live(endpoint: str, folder: str, rank: int, says_why: bool) -> Life:
    """One member's life; with `says_why` the leaver's exception ends its connection, else it leaves without a cause."""
    called = Path(folder) / "newcomer"
    if rank == NEWCOMER:
        _wait_for(called.exists)
    life = Life(rank)
    model = client.convert_model(network())
    optimizer = optimizer_of(model)
    sampler = client.ElasticSampler(range(SAMPLES), seed=5)
    state = client.ElasticState(model, optimizer, sampler, epoch=0, step=0, last_epoch=ENDLESS)
    training = _Training(life, called)
    try:
        given = {"job": "elastic", "rank": rank, "world_size": WORLD_SIZE, "round_timeout": SECONDS}
        with client.connect(endpoint, policy="elastic", min_members=1, **given) as connection:
            life.first_step = connection.first_step
            training.connection = connection
            try:
                client.run_elastic(training.train, state)
            except Leaves:
                if says_why:
                    raise
    except Leaves:
        pass
    life.state = _state(model, optimizer)
    return life


class _Training:
    def __init__(self, life: Life, called: Path) -> None:
        self._life, self._called = life, called
        self._expiry = time.monotonic() + SECONDS
        self.connection: Any = None

    def train(self, state: client.ElasticState) -> None:
        life = self._life
        for number in [number for number in life.steps if number >= state.step]:
            del life.steps[number]
            life.undone += 1
        if life.rank == 0 and life.changes:
            self._called.touch()
        loader = DataLoader(torch.arange(SAMPLES), BATCH, sampler=state.sampler)
        while state.epoch < state.last_epoch:
            state.sampler.set_epoch(state.epoch)
            for index, samples in enumerate(loader):
                self._learn(state, samples)
                state.sampler.record_batch(index, BATCH)
                if index % COMMIT_EVERY == COMMIT_EVERY - 1:
                    self._commit(state)
            self._commit(state)
            state.epoch += 1

    def _learn(self, state: client.ElasticState, samples: Tensor) -> None:
        assert time.monotonic() < self._expiry, "the newcomer has not come"
        state.model.zero_grad()
        loss_of(state.model, samples).backward()
        probe = client.SlavePipe(self.connection, "probe").run_slave(Rows((len(samples),), np.zeros((1, 2, 1))))
        averaged_over = client.average_gradients(state.model, len(samples))
        state.optimizer.step()
        members = self.connection.members
        assert list(probe.members) == members
        self._life.steps[state.step] = Step(
            state.epoch, samples.tolist(), members, probe.replicas, probe.count, averaged_over
        )
        state.step += 1
        if NEWCOMER in members:
            state.last_epoch = min(state.last_epoch, state.epoch + EPOCHS_WITH_NEWCOMER)
        if self._life.rank == LEAVER and state.step == LEAVES_AFTER_STEPS:
            raise Leaves

    def _commit(self, state: client.ElasticState) -> None:
        try:
            state.commit()
        except client.MembersChanged as change:
            self._life.changes.append((change.lost, change.joined))
            raise


def in_one_process(lives: list[Life]) -> dict[str, Tensor]:
    """The state after all steps that were not undone, each with the samples of the members that it covered."""
    by_rank = {life.rank: life.steps for life in lives}
    model = network()
    optimizer = optimizer_of(model)
    for number, step in sorted(by_rank[0].items()):
        samples = torch.tensor([sample for rank in step.members for sample in by_rank[rank][number].own])
        optimizer.zero_grad()
        (loss_of(model, samples) / len(samples)).backward()
        optimizer.step()
    return _state(model, optimizer)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    momenta = {f"momentum {number}": entry["momentum_buffer"] for number, entry in enumerate(optimizer.state.values())}
    return {name: value.detach() for name, value in model.state_dict().items()} | momenta


def _wait_for(condition: Callable[[], bool]) -> None:
    expiry = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < expiry, "the others have not called the newcomer"
        time.sleep(PAUSE_SECONDS)
