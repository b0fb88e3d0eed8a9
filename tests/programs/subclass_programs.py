"""Training with subclasses of torch's batch norm, for tests; as a script it trains under DDP and writes FILE."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import client
from programs import ddp_programs
from programs.member_programs import Buffers, state
from support.sentences import error_of
from support.subclasses import SYNCHRONISED, Activated, Decorated, Functional, Helped, Reduced, SkipsEmpty, Slotted
from zoo.libraries import library
from zoo.specimen import prepare


@dataclass(frozen=True)
class Sparse:
    F: Tensor


class PassesNoRows(nn.BatchNorm1d):
    def forward(self, x: Sparse) -> Sparse:
        return Sparse(super().forward(x.F)) if len(x.F) else x


class TakesNoRows(nn.BatchNorm1d):
    def forward(self, x: Sparse) -> Sparse:
        return Sparse(super().forward(x.F))


@dataclass(frozen=True)
class Training:
    network: str = "three kinds"  # a key of `KINDS`, or a network of timm
    sizes: tuple[int, ...] = (3, 1)  # samples per member
    backend: str = ""  # of torch.compile; eager if empty
    steps: int = 4
    lr: float = 0.01

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.network in KINDS:
            pairs = [(nn.Conv2d(2, 2, 1), kind(2)) for kind in KINDS[self.network]]
            for _, layer in pairs:  # from 0, a bias before a batch norm would become a mere rounding error
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.uniform_(layer.bias)
            return nn.Sequential(*(layer for pair in pairs for layer in pair)).double()
        model = library("timm").create_model(self.network, num_classes=3)
        prepare(model)
        return model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        shape = (2, 3, 2) if self.network in KINDS else (3, 32, 32)
        outputs = shape if self.network in KINDS else (3,)
        drawn = (
            torch.randn(sum(self.sizes), *size, generator=generator, dtype=torch.float64) for size in (shape, outputs)
        )
        x, factors = drawn
        return x, factors


KINDS = {"three kinds": [Functional, Activated, Helped], "all kinds": SYNCHRONISED, "empty": [SkipsEmpty, SkipsEmpty]}


def _in_threes() -> list[list[type[nn.Module]]]:
    """The remaining kinds, in short chains: a longer one would amplify rounding errors."""
    others = [kind for kind in (*SYNCHRONISED, Decorated, Slotted, Reduced) if kind not in KINDS["three kinds"]]
    return [others[first : first + 3] for first in range(0, len(others), 3)]


IN_THREES = {" ".join(kind.__name__ for kind in three): three for three in _in_threes()}
KINDS |= IN_THREES


def train(connection: client.Connection, training: Training) -> Buffers:
    """Weights and buffers after some steps on this member's shards."""
    torch.compiler.reset()
    model = client.convert_model(training.model())
    run = compiled(model, training)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr)
    for step in range(training.steps):
        optimizer.zero_grad()
        loss_of_shard(run, training, step, connection.rank).backward()
        client.average_gradients(model)
        optimizer.step()
    return state(model)


def pass_a_layer_without_rows_on_rank_1(who: Any) -> str:
    """The other ranks wait in that layer, and rank 1 in the next one; returns the error."""
    model = client.convert_model(nn.Sequential(PassesNoRows(3), TakesNoRows(3)))
    return error_of(model, Sparse(torch.randn(0 if who.member.rank == 1 else 4, 3)))


def train_under_ddp(connection: client.Connection, store: str, training: Training) -> Buffers:
    torch.compiler.reset()
    with ddp_programs.process_group(store, connection):
        return train_in_process_group(training, connection.rank)


def train_in_process_group(training: Training, rank: int) -> Buffers:
    model = client.convert_model(training.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr)
    parallel = ddp_programs.keep(DistributedDataParallel(compiled(model, training)))
    whole = training.backend not in {"", "inductor"}  # see "DDP compiled with aot_eager" in docs/features.md
    with torch._dynamo.config.patch(optimize_ddp=False) if whole else nullcontext():
        for step in range(training.steps):
            optimizer.zero_grad()
            loss_of_shard(parallel, training, step, rank).backward()
            optimizer.step()
    return state(model)


def train_in_replicas(training: Training) -> Buffers:
    model = client.convert_model(training.model())
    _train_whole(client.DataParallelWithCallback(model, ["cpu"] * len(training.sizes)), training)
    return state(model)


def train_on_the_whole_batch(training: Training) -> Buffers:
    model = training.model()
    _train_whole(model, training)
    return state(model)


def compiled(model: nn.Module, training: Training) -> nn.Module:
    return torch.compile(model, fullgraph=True, backend=training.backend) if training.backend else model


def loss_of_shard(run: nn.Module, training: Training, step: int, rank: int) -> Tensor:
    """The loss of a shard, scaled so that the mean over the ranks is the loss of the whole batch."""
    x, factors = (whole.split(training.sizes)[rank] for whole in training.batch(step))
    return (run(x) * factors).sum().mul(len(training.sizes))


def _train_whole(run: nn.Module, training: Training) -> None:
    optimizer = torch.optim.SGD(run.parameters(), lr=training.lr)
    for step in range(training.steps):
        x, factors = training.batch(step)
        optimizer.zero_grad()
        (run(x) * factors).sum().backward()
        optimizer.step()


def main() -> None:
    distributed.init_process_group("gloo")
    with client.connect(round_timeout=ddp_programs.SECONDS) as connection:
        found = train_in_process_group(Training("all kinds", steps=20, lr=1e-4), connection.rank)
        distributed.barrier()
    if distributed.get_rank() == 0:
        np.savez(sys.argv[1], **found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
