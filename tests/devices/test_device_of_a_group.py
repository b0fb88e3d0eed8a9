"""The device that carries host messages in a group whose backend takes only GPU tensors, like NCCL."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

import client
from client.nn.call import SynchronizedCall
from client.nn.running_stats import MomentAccumulator
from client.ops.functional import Slice
from client.transports import device_rows, process_group
from client.transports.process_group import ProcessGroupPipe
from statsd_bn.reduction import Rows

SECOND = torch.device("cuda", 1)


class Backend:
    def name(self):
        return "nccl"


class Sent(Exception):
    """Raised instead of moving a host message to a device that this machine lacks."""


class Destinations(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to:
            raise Sent(args[1])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def transport(monkeypatch):
    """A transport over a group of one rank that takes only GPU tensors."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    world = distributed.group.WORLD
    monkeypatch.setattr(type(world), "_device_types", [torch.device("cuda")])
    monkeypatch.setattr(type(world), "_get_backend", lambda *_: Backend())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield ProcessGroupPipe(process_group.named(world), "bn")
    distributed.destroy_process_group()


def device_of(send, *given):
    with Destinations(), pytest.raises(Sent) as sent:
        send(*given)
    return sent.value.args[0]


def input_on(device):
    return SimpleNamespace(device=torch.device(device), shape=(4, 3), requires_grad=False)


def gather(transport):
    process_group.all_gather(transport.process_group, "losses", b"1.5")


def test_the_message_before_the_first_round_uses_the_device_of_the_input(transport):
    assert device_of(device_rows.device_capacity, transport, [input_on(SECOND)]) == SECOND


def test_later_host_messages_use_the_device_of_the_input_too(transport):
    device_of(device_rows.device_capacity, transport, [input_on(SECOND)])
    assert device_of(gather, transport) == SECOND


def test_rounds_of_recalibration_use_the_device_of_the_input_too(transport):
    layer = client.SynchronizedBatchNorm1d(3)
    layer.layer_name = "bn"
    call = SynchronizedCall(layer, transport, MomentAccumulator(), None, None)
    call._new_exchange([Slice(input_on(SECOND), None, None)])
    row = Rows((4,), np.zeros((1, 2, 3)))
    assert device_of(transport.run_slave, row) == SECOND


def test_an_input_on_the_cpu_does_not_change_the_device(transport):
    device_of(device_rows.device_capacity, transport, [input_on(SECOND)])
    assert device_of(device_rows.device_capacity, transport, [input_on("cpu")]) == SECOND


def test_before_any_input_host_messages_use_the_device_that_the_group_is_bound_to(transport, monkeypatch):
    monkeypatch.setattr(type(distributed.group.WORLD), "bound_device_id", SECOND)
    assert device_of(gather, transport) == SECOND


def test_without_a_bound_device_host_messages_use_the_current_device(transport, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of(gather, transport) == SECOND
