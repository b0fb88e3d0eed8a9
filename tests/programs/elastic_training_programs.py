"""The processes of `test_elastic.py`: they train a model with batch norm under `run_elastic`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import client
from support.starter import STARTER

WAIT_SECONDS = 60.0
SAMPLES, BATCH, COMMIT_EVERY = 90, 4, 3


@dataclass
class Process:
    process: BaseProcess
    pipe: Pipe

    def go(self) -> None:
        self.pipe.send("go")

    def wait_for_batch(self, number: int) -> None:
        """Waits until this member has trained on its batch `number`, counted from 1."""
        while self._message() != number:
            pass

    def result(self) -> tuple[bytes, list[float], int]:
        while isinstance(message := self._message(), int):
            pass
        return message

    def _message(self) -> Any:
        assert self.pipe.poll(WAIT_SECONDS), "no word from the member"
        return self.pipe.recv()


@contextmanager
def started(endpoint: str, job: str, member: int, world_size: int, epochs: int) -> Iterator[Process]:
    """Runs a member during the block; it has loaded torch, and waits for `go`."""
    pipe, theirs = STARTER.Pipe()
    process = STARTER.Process(target=_live, args=(theirs, endpoint, job, member, world_size, epochs))
    process.start()
    theirs.close()
    try:
        mine = Process(process, pipe)
        assert mine._message() == 0
        yield mine
    finally:
        pipe.close()
        process.kill()
        process.join()


class Network(nn.Module):
    """Batch norm, and a weight for each sample that counts how often it was learnt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.times_learnt = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        features = torch.stack([samples.sin(), samples.cos(), samples / SAMPLES], dim=1)
        return self.layers(features).square().sum() + self.times_learnt[samples.long()].sum()


def _live(pipe: Pipe, endpoint: str, job: str, member: int, world_size: int, epochs: int) -> None:
    torch.set_num_threads(1)
    model = client.convert_model(Network())
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9)
    state = client.ElasticState(model, optimizer, client.ElasticSampler(range(SAMPLES)), epoch=0)
    batches = 0

    def train(state: client.ElasticState) -> None:
        nonlocal batches
        loader = DataLoader(torch.arange(SAMPLES).float(), BATCH, sampler=state.sampler)
        while state.epoch < epochs:
            state.sampler.set_epoch(state.epoch)
            for index, samples in enumerate(loader):
                _learn(model, optimizer, samples)
                state.sampler.record_batch(index, BATCH)
                batches += 1
                pipe.send(batches)
                if index % COMMIT_EVERY == COMMIT_EVERY - 1:
                    state.commit()
            state.commit()
            state.epoch += 1

    pipe.send(0)
    pipe.recv()
    given = {"job": job, "rank": member, "world_size": world_size, "round_timeout": WAIT_SECONDS}
    with client.connect(endpoint, policy="elastic", min_members=1, **given):
        client.run_elastic(train, state)
    bits = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
    momenta = b"".join(entry["momentum_buffer"].numpy().tobytes() for entry in optimizer.state.values())
    pipe.send((bits + momenta, model.times_learnt.tolist(), batches))


def _learn(model: Network, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    model.zero_grad()
    model(samples).backward()
    total = client.average_gradients(model, len(samples))
    optimizer.step()
    with torch.no_grad():
        model.times_learnt += (model.times_learnt.grad * total).round()
