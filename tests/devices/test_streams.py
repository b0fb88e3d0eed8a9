"""Replicas on devices with separate streams; the CPU represents a GPU, and fake streams record the calls."""

from contextlib import contextmanager

import pytest
import torch

import client
from client.ops import functional
from client.ops.exchange import Exchange
from support.replicas_on_devices import Layered, plain
from support.transports import rows_on_devices


class Streams:
    """The fake streams that are entered, innermost last, and the recorded events in order."""

    def __init__(self):
        self.current = []
        self.events = []

    @contextmanager
    def entered(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()

    def note(self, function, name):
        def run(*given):
            self.events.append((name, self.current[-1].name))
            return function(*given)

        return run


class Stream:
    device = torch.device("cpu")

    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append((f"{self.name} waits for", other.name))


@pytest.fixture
def world(monkeypatch):
    found = Streams()
    found.current.append(Stream("autograd's", found.events))
    replicas = {number: Stream(f"replica {number}'s", found.events) for number in range(2)}

    def record_stream(tensor, stream):
        found.events.append((tuple(tensor.shape), stream.name))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.current[-1])
    monkeypatch.setattr(torch.cuda, "stream", found.entered)
    monkeypatch.setattr(functional, "stream_of", lambda x: replicas[int(x.detach()[0, 0, 0])])
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    for phase in ("forward", "backward"):
        monkeypatch.setattr(Exchange, phase, found.note(getattr(Exchange, phase), phase))
    with rows_on_devices():
        yield found


def step(world, penalty=False):
    model = client.DataParallelWithCallback(Layered(plain), ["cpu"] * 2)
    x = torch.randn(4, 4, 5)
    x[:, 0, 0] = torch.arange(2).repeat_interleave(2)
    output = model(x.requires_grad_())
    if penalty:
        (output,) = torch.autograd.grad((output**3).sum(), x, create_graph=True)
    forward = world.events.copy()
    world.events.clear()
    output.square().sum().backward()
    return forward, world.events


def test_both_passes_are_computed_in_the_streams_of_the_replicas(world):
    forward, backward = step(world)
    assert forward == [("forward", "replica 1's")], "replica 1 is the last one on its device"
    assert ("backward", "replica 1's") in backward


@pytest.mark.parametrize("penalty", [False, True], ids=["first derivative", "second derivative"])
def test_in_a_backward_pass_the_streams_of_replicas_and_of_autograd_wait_for_each_other(world, penalty):
    _, events = step(world, penalty)
    waits, computed, waited = (
        [place for place, event in enumerate(events) if event == wanted]
        for wanted in (
            ("replica 1's waits for", "autograd's"),
            ("backward", "replica 1's"),
            ("autograd's waits for", "replica 1's"),
        )
    )
    assert len(waits) == len(computed) == len(waited) > 0
    assert all(a < b < c for a, b, c in zip(waits, computed, waited, strict=True))


def test_memory_is_held_until_the_other_stream_has_read_it(world):
    """The replicas' stream holds gradients, inputs and weights; autograd's stream holds the results."""
    _, events = step(world)
    computed = events.index(("backward", "replica 1's"))
    slice_, vector = (2, 4, 5), (4,)
    before, after = events[:computed], events[computed:]
    assert before.count((slice_, "replica 1's")) == 4, "two gradients and two inputs"
    assert before.count((vector, "replica 1's")) == 2, "two weights"
    assert after.count((slice_, "autograd's")) == 2
    assert after.count((vector, "autograd's")) == 4, "gradients of two weights and two biases"


def test_one_stream_needs_no_wait(world, monkeypatch):
    monkeypatch.setattr(functional, "stream_of", lambda _: world.current[0])
    assert step(world) == ([("forward", "autograd's")], [("backward", "autograd's")])
