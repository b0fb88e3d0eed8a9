"""What member processes do in `test_mismatch.py`: train alike, and then the last member does something else."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import client
from statsd_bn import StatsdBNError

CHANNELS = 3
STEPS = 2


@dataclass
class Outcome:
    """What a member was told, and when it began the step and was told, on the clock that all processes share."""

    error: StatsdBNError | None
    began: float
    told: float


def last_member_differs(connection: client.Connection, odd: Callable[[nn.ModuleDict], None]) -> Outcome:
    layers = network()
    for _ in range(STEPS):
        alike(layers)
    who = connection.member
    return outcome(odd if who.rank == who.world_size - 1 else alike, layers)


def all_but_the_last_wait_for_a_group(connection: client.Connection) -> Outcome:
    """The last member goes on in the world; the others wait for it in a group that none has used yet."""
    who = connection.member
    layers = network()
    alike(layers)
    paired = client.SynchronizedBatchNorm1d(CHANNELS, group=client.Group("paired", who.world_size))
    paired.layer_name = "paired.bn"
    layers["paired"] = paired
    return outcome(alike if who.rank == who.world_size - 1 else paired_first, layers)


def outcome(program: Callable[[nn.ModuleDict], None], layers: nn.ModuleDict) -> Outcome:
    began = time.monotonic()
    error = None
    try:
        program(layers)
    except StatsdBNError as raised:
        error = raised
    return Outcome(error, began, time.monotonic())


def network() -> nn.ModuleDict:
    torch.manual_seed(0)
    return client.convert_model(
        nn.ModuleDict({name: nn.BatchNorm1d(CHANNELS) for name in ("first", "second", "third")})
    )


def run(layers: nn.ModuleDict, *names: str) -> None:
    output = torch.randn(4, CHANNELS, requires_grad=True)
    for name in names:
        output = layers[name](output)
    (output**2).sum().backward()


def alike(layers: nn.ModuleDict) -> None:
    run(layers, "first", "second", "third")


def paired_first(layers: nn.ModuleDict) -> None:
    run(layers, "paired", "first", "second", "third")


def other_order(layers: nn.ModuleDict) -> None:
    run(layers, "second", "first", "third")


def one_skipped(layers: nn.ModuleDict) -> None:
    run(layers, "first", "third")


def one_forward_more(layers: nn.ModuleDict) -> None:
    with torch.no_grad():
        for layer in layers.values():
            layer(torch.randn(4, CHANNELS))
    alike(layers)
