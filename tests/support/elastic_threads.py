"""Elastic members as threads that die and join in any round; each weight counts how often its sample was learnt."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from client.elastic import sampler, state
from client.elastic.sampler import ElasticSampler
from client.elastic.state import ElasticState, run_elastic
from client.session.connection import Connection
from client.training import gradients
from client.training.gradients import average_gradients
from client.transports import choose
from statsd_bn.errors import ReplicaLost
from support.memory_members import MemoryMaster, run_members, wait_until

WAIT_SECONDS = 60.0

_here = threading.local()


class Killed(Exception):
    """Raised in a member's thread to simulate its death."""


@dataclass(frozen=True)
class Job:
    """Size of the training of all members, and the number of batches between two commits."""

    samples: int
    batch: int
    commit_every: int
    epochs: int


@dataclass
class World:
    job: Job
    master: MemoryMaster = field(default_factory=MemoryMaster)
    states: dict[int, ElasticState] = field(default_factory=dict)

    def run(self, world_size: int, deaths: dict[int, int], newcomers: dict[int, tuple[int, int]]) -> dict[int, Any]:
        """Train; returns the final weights of the remaining members, as lists.

        `deaths` maps a member to the round in which it dies. `newcomers` maps a newcomer to (member, round): it starts
        when that member reaches that round. A newcomer may reuse the number of a dead member.
        """
        deaths = dict(deaths)
        with ThreadPoolExecutor(world_size + len(newcomers)) as executor, own_connections():
            futures: list[tuple[int, Future[Any]]] = []

            def start(member: int) -> None:
                life = executor.submit(self._live, member, world_size, deaths.pop(member, None), arrivals)
                futures.append((member, life))

            def arrive(member: int) -> None:
                if member in self.master.members("world"):
                    return
                start(member)
                # Wait until the newcomer has joined: after the end of this job the newcomer would start another job.
                wait_until(lambda: member in self.master.members("world"))

            arrivals = {place: (lambda member=member: arrive(member)) for member, place in newcomers.items()}
            for member in range(world_size):
                start(member)
            # The list grows during the loop: a running member starts newcomers, which are appended.
            results = [(member, future.result(timeout=WAIT_SECONDS)) for member, future in futures]
        return {member: weights for member, weights in sorted(results, key=itemgetter(0)) if weights is not None}

    def _live(
        self, member: int, world_size: int, death: int | None, arrivals: dict[tuple[int, int], Callable[[], None]]
    ) -> Any:
        connection = self.master.connect(member, world_size, min_members=1)
        _count_rounds(connection, death, arrivals)
        use(connection)
        try:
            with connection:
                model = nn.Linear(self.job.samples, 1, bias=False)
                nn.init.constant_(model.weight, 0.0)
                state = ElasticState(model, None, ElasticSampler(range(self.job.samples), seed=3), epoch=0)
                self.states[member] = state
                run_elastic(self.train, state)
                return model.weight.detach().flatten().tolist()
        except Killed:
            return None
        except ReplicaLost as error:
            if error.fields["cause"] != "joined too late":
                raise
            return None

    def train(self, state: ElasticState) -> None:
        loader: Any = DataLoader(range(self.job.samples), self.job.batch, sampler=state.sampler)
        while state.epoch < self.job.epochs:
            state.sampler.set_epoch(state.epoch)
            for index, batch in enumerate(loader):
                learn(state.model, batch)
                state.sampler.record_batch(index, self.job.batch)
                if index % self.job.commit_every == self.job.commit_every - 1:
                    state.commit()
            state.commit()
            state.epoch += 1


def learn(model: nn.Module, batch: torch.Tensor) -> None:
    """Adds 1 to the weight of each sample in the members' batches."""
    model.weight.grad = None
    model.weight[0, batch].sum().backward()
    total = average_gradients(model, len(batch))
    with torch.no_grad():
        model.weight += (model.weight.grad * total).round()


def _count_rounds(
    connection: Connection, death: int | None, arrivals: dict[tuple[int, int], Callable[[], None]]
) -> None:
    through = connection._begin_round
    member = connection.rank

    def counted(*arguments: Any, **options: Any) -> Any:
        if connection.rounds == death:
            raise Killed
        if arrival := arrivals.pop((member, connection.rounds), None):
            arrival()
        return through(*arguments, **options)

    connection._begin_round = counted


def use(connection: Connection) -> None:
    _here.connection = connection


@contextmanager
def own_connections() -> Iterator[None]:
    """Give each thread its own current connection, although a process normally has one for all threads."""

    def here() -> Connection | None:
        return getattr(_here, "connection", None)

    with (
        mock.patch.object(state, "current_connection", here),
        mock.patch.object(sampler, "current_connection", here),
        mock.patch.object(gradients, "current_connection", here),
        mock.patch.object(choose, "current_connection", here),
    ):
        yield


def run_as_current(n: int, program: Callable[[Connection], Any]) -> list[Any]:
    """Like `run_members`, with each member's connection as the current one of its thread."""

    def member(connection: Connection) -> Any:
        use(connection)
        return program(connection)

    with own_connections():
        return run_members(n, member)
