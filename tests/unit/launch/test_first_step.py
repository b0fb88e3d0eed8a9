"""A connection's first step: whoever forgot to convert the model is told then, the others how many layers."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import client
from client.launch import backward_sighting
from client.launch.first_step import FirstStep
from statsd_bn import Rows
from support.memory_members import run_members, wait_until

X = torch.arange(12.0).reshape(4, 3)


@pytest.fixture
def told(caplog):
    caplog.set_level("INFO", "statsd_bn.client")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def network() -> Callable[[], None]:
    """A training step of a network without layers of ours."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()

    return step


def hooks() -> int:
    return len(_global_optimizer_post_hooks)


def exchange(connection, layer, key=None):
    return client.SlavePipe(connection, layer).run_slave(Rows((4,), np.ones((1, 2, 3))), key)


def run(program, others=lambda _: None):
    """Rank 0 runs the program; the other rank takes part in its rounds, and leaves torch's hooks alone."""
    before = hooks()
    run_members(2, lambda connection: (others if connection.rank else program)(connection))
    assert hooks() == before


def test_an_optimizer_that_steps_twice_before_any_round_is_told_of_once_and_at_once(told):
    def train(connection):
        FirstStep(connection)
        step = network()
        step()
        step()
        ((level, text),) = told()
        assert level == "WARNING"
        assert (
            "no layer, and the optimizer has stepped twice: was the model given to client.convert_model(), and" in text
        )
        step()
        connection.close()
        assert len(told()) == 1

    run(train, lambda connection: connection.close("a cause"))


def test_another_networks_optimizer_may_step_before_any_layer_runs_as_that_of_a_critic(told):
    def train(connection):
        FirstStep(connection)
        network()()
        network()()
        assert told() == []
        exchange(connection, "generator.bn")

    run(train, lambda connection: exchange(connection, "generator.bn"))
    assert told() == []


def test_one_that_has_only_gathered_is_told_too(told):
    def train(connection):
        FirstStep(connection)
        connection.all_gather("hello", b"")
        step = network()
        step()
        step()
        assert "was the model given to client.convert_model(), and" in told()[0][1]

    run(train, lambda connection: connection.all_gather("hello", b""))


def test_a_round_before_the_optimizer_steps_ends_the_watch_and_the_layers_are_counted(told):
    def take_part(connection):
        keys = [exchange(connection, name).key for name in ("a", "b", "a")]
        assert connection.rank == 1 or hooks() == before, "it costs nothing from now on"
        exchange(connection, "a", keys[0].of_phase("backward"))
        exchange(connection, "c")

    def train(connection):
        FirstStep(connection)
        take_part(connection)
        assert connection.watch is None
        network()()

    before = hooks()
    run(train, take_part)
    ((level, text),) = told()
    assert level == "INFO"
    assert text.endswith("2 layers were synchronised in the first step")


class UntilTold(torch.autograd.Function):
    """A backward pass that lasts until somebody was told something."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.told = told
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        wait_until(ctx.told)
        return gradient, None


def test_a_training_that_steps_no_optimizer_is_told_of_in_a_backward_pass(told, monkeypatch):
    monkeypatch.setattr(backward_sighting, "FIRST_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(backward_sighting, "PAUSE_SECONDS", 0.01)

    def train(connection):
        assert not backward_sighting.is_in_backward()
        FirstStep(connection)
        weight = torch.ones(3, requires_grad=True)
        UntilTold.apply(weight, told).sum().backward()
        ((level, text),) = told()
        assert level == "WARNING"
        assert "no layer, and a backward pass is under way: was the model given to client.convert_model(), and" in text

    run(train, lambda connection: connection.close("a cause"))


def test_nobody_looks_for_a_backward_pass_once_there_was_a_round_or_the_end():
    def is_watched():
        return any(thread.name == "statsd_bn first step" for thread in threading.enumerate())

    def train(connection):
        FirstStep(connection)
        assert is_watched()
        exchange(connection, "a")
        wait_until(lambda: not is_watched())

    def end(connection):
        FirstStep(connection)
        connection.close()
        wait_until(lambda: not is_watched())

    run(train, lambda connection: exchange(connection, "a"))
    run(end, lambda connection: connection.close("a cause"))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_optimizers_are_left_alone():
    """The hook would break their graph; whoever steps so is told at the end."""

    def train(connection):
        FirstStep(connection)
        model = nn.Linear(3, 1)
        model(X).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        torch.compile(optimizer.step, backend="eager")()
        assert not torch.equal(before, model.weight)

    run(train)
