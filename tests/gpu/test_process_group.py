"""A process group that gathers on the GPU: NCCL, or gloo with the CPU as the device."""

from contextlib import nullcontext

import pytest
import torch
from torch import distributed

from client.nn import batchnorm
from client.transports import process_group
from client.transports.process_group import ProcessGroupPipe
from support.cuda_stand_ins import as_on_cuda
from support.no_host import nobody_waits_for
from support.replicas_on_devices import RUNS, Layered, exchanges_noted

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")


@pytest.fixture(autouse=True)
def _group_of_one(device, monkeypatch):
    backend = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(batchnorm, "communicator_for", lambda _: process_group.named(distributed.group.WORLD))
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("run", RUNS)
def test_a_rank_does_not_wait_for_its_device(device, run):
    with exchanges_noted() as made, as_on_cuda(device):
        model = Layered(run).to(device)
        for step in range(3):
            x = torch.randn(6, 4, 5).to(device).requires_grad_()
            with nobody_waits_for(device) if step else nullcontext():
                model(x).square().sum().backward()
    assert set(made) == {ProcessGroupPipe}
