"""Torch's own distributed tests of `nn.SyncBatchNorm` on our layers, under torchrun, on the CPU instead of GPUs.

Rank 0 prints the transport and name of each passed test; a failure raises.
"""

import inspect
import os
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

# Torch's module of tests reads these at its import.
os.environ["BACKEND"] = "gloo"
os.environ["TEMP_DIR"] = tempfile.gettempdir()

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import TestCase, set_rng_seed
from torch.testing._internal.distributed import distributed_test

import client
from support.torchs_own_tests import names_for
from support.transports import ON_DEVICE, PROCESS_GROUP, TRANSPORTS, rows_on_devices


class TorchsOwn(distributed_test.DistributedTest._DistTestBase, TestCase):
    """Torch's tests, run in this process instead of new ones."""

    world_size = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])

    def _barrier(self, *_args: Any, **_named: Any) -> None:
        distributed.barrier()


class TorchWithoutGpus:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")

    def randn(self, *sizes: int, device: Any = None, **named: Any) -> torch.Tensor:
        del device
        return torch.randn(*sizes, **named)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(block)


def stay_on_the_cpu() -> None:
    distributed_test.torch = TorchWithoutGpus()
    distributed_test.torchvision = SimpleNamespace(models=SimpleNamespace(resnet50=ResNet))
    torch.cuda.set_device = lambda _device: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = nn.Module.cuda = lambda self, *_args, **_named: self
    wrap = DistributedDataParallel.__init__

    def without_devices(self: Any, module: nn.Module, device_ids: Any = None, **named: Any) -> None:
        del device_ids
        wrap(self, module, **named)

    DistributedDataParallel.__init__ = without_devices


def run() -> None:
    distributed.init_process_group("gloo")
    stay_on_the_cpu()
    # Replace only this class: nn.BatchNorm1d is the reference of the tests.
    nn.SyncBatchNorm = client.SynchronizedBatchNorm
    for transport in TRANSPORTS:
        with _way_to(transport):
            run_over(transport)
    # gloo's threads outlive the group, and sometimes abort an interpreter during its shutdown (pytorch#179291).
    sys.stdout.flush()
    os._exit(0)


def _way_to(transport: str) -> AbstractContextManager[Any]:
    if transport == ON_DEVICE:
        return rows_on_devices()
    return nullcontext() if transport == PROCESS_GROUP else client.connect(transport=transport, job=transport)


def run_over(transport: str) -> None:
    for name in names_for(TorchsOwn.world_size):
        set_rng_seed(1)
        # Without the decorators, which skip the test where there is no GPU.
        inspect.unwrap(getattr(TorchsOwn, name))(TorchsOwn(name))
        distributed.barrier()
        if TorchsOwn.rank == 0:
            sys.stdout.write(f"{transport}: {name}\n")
    distributed.barrier()


if __name__ == "__main__":
    run()
