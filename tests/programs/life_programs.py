"""Training in `test_life.py` while layers are copied, saved, moved, shared and forked, with or without a connection."""

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import client
from programs import member_programs
from programs.member_programs import Buffers, state
from support.sentences import error_of

STEPS = 4
DECAY = 0.7
BN = 1  # the index of a batch norm in the network

# Limit for a batch, which takes milliseconds: a hung worker fails the test.
WORKER_SECONDS = 15

Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Tanh()
    ).double()


def network_of(connection: client.Connection | None) -> nn.Sequential:
    return network() if connection is None else client.convert_model(network())


def shard(connection: client.Connection | None, step: int) -> Batch:
    batch = member_programs.batch(step)
    if connection is None:
        return batch
    who = connection.member
    return tuple(whole.chunk(who.world_size)[who.rank] for whole in batch)


def take_step(
    connection: client.Connection | None, model: nn.Module, batch: Batch, meanwhile: Callable[[], object] = lambda: None
) -> int:
    """One step of gradient descent, gradients summed over the members; returns how many rounds its layers took."""
    x, factors = batch
    before = getattr(connection, "rounds", 0)
    model.zero_grad()
    loss = (model(x) * factors).sum()
    meanwhile()
    loss.backward()
    rounds = getattr(connection, "rounds", 0) - before
    if connection:
        member_programs.sum_gradients(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
    return rounds


def train(connection: client.Connection | None, renew: Callable[[nn.Module], nn.Module]) -> Buffers:
    model = network_of(connection)
    for step in range(STEPS):
        take_step(connection, model, shard(connection, step))
        model = renew(model)
    return state(model)


def train_where_member_0_copies(connection: client.Connection) -> Buffers:
    return train(connection, deepcopied if connection.rank == 0 else lambda model: model)


def deepcopied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes


def saved_whole(model: nn.Module) -> nn.Module:
    return through_file(model, weights_only=False)


def saved_as_state_through_torchs_layers(model: nn.Module) -> nn.Module:
    """Loads our state into torch's layers and their state into ours, without missing or unexpected keys."""
    plain, same = network(), _blank(model)
    plain.load_state_dict(through_file(model.state_dict(), weights_only=True))
    same.load_state_dict(through_file(plain.state_dict(), weights_only=True))
    return same


def shared(model: nn.Module) -> nn.Module:
    model.share_memory()
    assert all(value.is_shared() for value in model.state_dict().values())
    return model


def moved(model: nn.Module) -> nn.Module:
    return model.to(torch.device("cpu"), torch.float64, memory_format=torch.channels_last)


def reverted_and_converted_again(model: nn.Module) -> nn.Module:
    return client.convert_model(client.revert_model(model)) if _is_ours(model) else model


def through_file(value: object, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _is_ours(model: nn.Sequential) -> bool:
    return isinstance(model[BN], client.SynchronizedBatchNorm2d)


def _blank(model: nn.Sequential) -> nn.Module:
    return client.convert_model(network()) if _is_ours(model) else network()


def train_with_averages(connection: client.Connection | None) -> tuple[Buffers, list[Tensor], int]:
    """Two moving averages, evaluated on member 0 alone: all states, the averages' outputs, and the rounds."""
    model = network_of(connection)
    by_hand = copy.deepcopy(model).eval()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True).eval()
    first = connection is None or connection.rank == 0
    outputs = []

    def evaluate() -> None:
        if first:
            outputs.extend(twin(member_programs.batch(1000)[0]).detach() for twin in (by_hand, averaged))

    rounds = 0
    for step in range(STEPS):
        rounds += take_step(connection, model, shard(connection, step), meanwhile=evaluate)
        averaged.update_parameters(model)
        for mean, newest in zip(by_hand.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(DECAY * mean + (1 - DECAY) * newest)
        before = 0 if connection is None else connection.rounds
        evaluate()
        rounds += 0 if connection is None else connection.rounds - before
    states = {"model": model, "by hand": by_hand, "averaged": averaged}
    return {f"{kind} {name}": v for kind, twin in states.items() for name, v in state(twin).items()}, outputs, rounds


class Images(Dataset[tuple[Batch, Tensor, str]]):
    """This member's batches, loaded in a worker that also runs layers, in eval and in training."""

    def __init__(self, steps: range, connection: client.Connection | None, layer: nn.Module) -> None:
        self._steps = steps
        self._connection = connection
        self._training = layer
        self._eval = copy.deepcopy(layer).eval()

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> tuple[Batch, Tensor, str]:
        if index >= len(self):
            raise IndexError(index)
        x, factors = shard(self._connection, self._steps[index])
        features = x.expand(-1, self._eval.num_features, -1, -1)
        with torch.no_grad():
            evaluated = self._eval(features)
            error = error_of(self._training, features)
        # A worker may disconnect at its end; the member must stay in the job.
        client.disconnect()
        return (x, factors), evaluated, error


def train_with_forked_workers(connection: client.Connection | None) -> tuple[Buffers, list[Tensor], list[str], int]:
    """Two epochs with two workers each, which end before the next epoch starts, and a last step."""
    model = network_of(connection)
    evaluated, errors = [], []
    for steps in (range(2), range(2, 4)):
        loader = DataLoader(
            Images(steps, connection, model[BN]),
            batch_size=None,
            num_workers=2,
            multiprocessing_context="fork",
            timeout=WORKER_SECONDS,
        )
        for batch, output, error in loader:
            take_step(connection, model, batch)
            evaluated.append(output)
            errors.append(error)
    take_step(connection, model, shard(connection, STEPS))
    return state(model), evaluated, errors, os.getpid()


def train_with_a_plain_loader() -> tuple[Buffers, list[Tensor]]:
    """The same training on whole batches without workers; `Images` gets a copy of the layer, and trains the copy."""
    model = network()
    evaluated = []
    for steps in (range(2), range(2, 4)):
        images = Images(steps, None, copy.deepcopy(model[BN]))
        for batch, output, _ in images:
            take_step(None, model, batch)
            evaluated.append(output)
    take_step(None, model, shard(None, STEPS))
    return state(model), evaluated
