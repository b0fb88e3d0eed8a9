"""What `test_public_reports.py` trains, written once for the whole batch, virtual replicas, and a rank of two."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

import client
from programs.contract_training_programs import Job, perhaps
from programs.ddp_programs import keep

STEPS = 3
SHARES = (4, 3)
FEATURES = 3

Seen = dict[str, Tensor]


class Part:
    rank = 0
    ranks = 1

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def batches(self, *shape: int, first: int = 0) -> list[Tensor]:
        """This part of batches of seven; each sample has a different mean, so a share differs from the whole."""
        means = torch.arange(sum(SHARES)).view(-1, *[1] * len(shape)) / 4
        generators = [torch.Generator().manual_seed(first + step) for step in range(STEPS)]
        return [torch.randn(len(means), *shape, generator=each, dtype=torch.float64) + means for each in generators]


class Replicas(Part):
    def wrap(self, model: nn.Module) -> nn.Module:
        return client.DataParallelWithCallback(client.convert_model(model), device_ids=["cpu"] * 2)


class Rank(Part):
    """A share of the batch, under DistributedDataParallel with its defaults."""

    ranks = len(SHARES)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def wrap(self, model: nn.Module) -> nn.Module:
        return keep(DistributedDataParallel(client.convert_model(model)))

    def batches(self, *shape: int, first: int = 0) -> list[Tensor]:
        return [whole.split(SHARES)[self.rank] for whole in super().batches(*shape, first=first)]


def on_a_rank(process: Any, program: Any, job: Job | None) -> Seen:
    with perhaps(job):
        return program(Rank(process.rank))


def network(outputs: int = FEATURES) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs)
    return nn.Sequential(*layers).double()


def descend(part: Part, model: nn.Module, loss: Tensor) -> None:
    """A step of gradient descent on the sum of the parts' losses; the factor undoes DDP's division by `ranks`."""
    model.zero_grad()
    (loss * part.ranks).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.05)


def train(part: Part, model: nn.Module, batches: Iterable[Tensor], after: Callable[[], None] = lambda: None) -> Seen:
    run = part.wrap(model)
    for batch in batches:
        descend(part, model, run(batch).sin().sum())
        after()
    return model.state_dict()


class Recurrent(nn.Module):
    """An LSTM; its gates pass two batch norms, which are called in each time step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.states = (
            nn.Sequential(nn.Linear(FEATURES, 4 * FEATURES, bias=False), nn.BatchNorm1d(4 * FEATURES)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = c = x[:, 0]
        for now in x.unbind(1):
            forget, add, show, new = (self.inputs(now) + self.states(h)).chunk(4, 1)
            c = forget.sigmoid() * c + add.sigmoid() * new.tanh()
            h = show.sigmoid() * c.tanh()
        return h


def recurrent_cell(part: Part) -> Seen:
    return train(part, Recurrent().double(), part.batches(5, FEATURES))


def folded_time(part: Part) -> Seen:
    """The layers' input is (N*T, C)."""
    return train(part, nn.Sequential(nn.Flatten(0, 1), *network()), part.batches(5, FEATURES))


def adversaries(part: Part) -> Seen:
    """A critic is called twice per step; the generator's step calls it frozen, and without its DDP wrapper."""
    critic, generator = network(1), network()
    judge, make = part.wrap(critic), part.wrap(generator)
    for real, noise in zip(part.batches(FEATURES), part.batches(FEATURES, first=10), strict=True):
        descend(part, critic, (judge(real).tanh() - judge(make(noise).detach()).sin()).sum())
        critic.requires_grad_(requires_grad=False)
        descend(part, generator, (critic if part.ranks > 1 else judge)(make(noise)).cos().sum())
        critic.requires_grad_(requires_grad=True)
    return nn.ModuleList([critic, generator]).state_dict()


def averaged_weights(part: Part) -> Seen:
    """Stochastic weight averaging, with torch's `update_bn` at the end."""
    model = network()
    averaged = AveragedModel(model)
    train(part, model, part.batches(FEATURES), after=lambda: averaged.update_parameters(model))
    update_bn(part.batches(FEATURES, first=10), part.wrap(averaged))
    return averaged.state_dict()


def averaging_hooks(part: Part) -> Seen:
    def average(layer: nn.Module, *_: object) -> None:
        for buffer in (layer.running_mean, layer.running_var):
            distributed.all_reduce(buffer)
            buffer.div_(part.ranks)

    model = network()
    if part.ranks > 1:
        model[1].register_forward_hook(average)
    return train(part, model, part.batches(FEATURES))


def other_order_of_keys(part: Part) -> Seen:
    torch.manual_seed(0)
    state = {f"{name}.{key}": torch.rand(FEATURES) for name in ("first", "last") for key in ("weight", "running_var")}
    names = ("last", "first") if part.rank else ("first", "last")
    model = nn.ModuleDict({name: nn.BatchNorm1d(FEATURES, dtype=torch.float64) for name in names})
    model = client.convert_model(model) if part.ranks > 1 else model
    model.load_state_dict({key: state[key] for key in sorted(state, reverse=part.rank == 1)}, strict=False)
    model["last"](model["first"](part.batches(FEATURES)[0]).tanh())
    return model.state_dict()


def spawned_workers(part: Part) -> Seen:
    """Workers that are spawned while this process is connected evaluate a synchronised layer."""
    model, batches = network(), part.batches(FEATURES)
    layer = client.convert_model(nn.BatchNorm1d(FEATURES, affine=False).double().eval())
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "timeout": 60}
    loaded = (
        DataLoader(batches, batch_size=None, collate_fn=layer, **options) if part.ranks > 1 else map(layer, batches)
    )
    return train(part, model, loaded)


REPORTS = [recurrent_cell, folded_time, adversaries, averaged_weights, averaging_hooks, other_order_of_keys]
