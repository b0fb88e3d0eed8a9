"""A script under torchrun with a fault on one rank.

    torchrun fault_programs.py WHAT VICTIM WRAPPER

WRAPPER is 1 for DistributedDataParallel with its defaults, which broadcasts buffers in each forward pass; 0 for one
that does not; 3 for fully_shard.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import nullcontext

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import client
from server.cli.status import ask
from support.output import print_line

STEPS, FAULT = 20, 6


def wrapped(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    model = client.convert_model(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    if wrapper == "3":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - torch 2.6 and later

        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    model = nn.parallel.DistributedDataParallel(model)
    if wrapper == "0":
        model.broadcast_buffers = False
    return model


def augment() -> None:
    raise RuntimeError("augmentation ran out of memory")


def hold_the_interpreter(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


def wait_for_the_other_to_wait() -> None:
    while not any(group["waiting"] for group in ask(client.current_connection().endpoint)["groups"]):
        time.sleep(0.02)


def load_a_batch() -> None:
    time.sleep(6.0)


# Collectives after the last batch, while the connection is still open.
AT_THE_END = {
    "fewer, then a barrier inside": distributed.barrier,
    "fewer, then a reduction inside": lambda: distributed.all_reduce(torch.ones(1)),
}


def befall(what: str, wrapper: str, model: nn.Module, x: torch.Tensor) -> bool:
    """Cause the fault; returns whether training continues."""
    print_line("fault", what)
    if what == "extra":
        model.module(x)
    elif what == "raises":
        augment()
    elif what == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "killed":
        if wrapper == "0":
            wait_for_the_other_to_wait()
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "holds the lock":
        hold_the_interpreter(10)
    elif what == "late":
        load_a_batch()
    return not what.startswith("fewer")


def main(what: str, victim: str, wrapper: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    with client.connect(os.environ.get("FAULT_ENDPOINT")) as connection:
        print_line("rank", connection.rank, os.getpid())
        for _ in range(int(os.environ.get("FAULT_GROUPS", "0"))):
            distributed.barrier(distributed.new_group())
        model = wrapped(wrapper)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            x = torch.randn(4, 8)
            is_fault = step == FAULT and connection.rank == int(victim)
            if is_fault and not befall(what, wrapper, model, x):
                break
            with model.no_sync() if is_fault and what == "reduces nothing" else nullcontext():
                loss = model(x).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if what in AT_THE_END:
            AT_THE_END[what]()
    if what == "fewer, then a barrier":
        distributed.barrier()
    print_line("done", connection.rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
