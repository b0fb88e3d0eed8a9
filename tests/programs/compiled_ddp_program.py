"""Trains a compiled network with several of DDP's buckets: `torchrun compiled_ddp_program.py FILE BACKEND`."""

import os
import sys
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, distributed, nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel

import client
from programs.member_programs import state

STEPS = 3
SIZES = (5, 3)
WIDTH = 512

# In MB: less than a weight of WIDTH x WIDTH in float64, which has 2, and more than DDP's first bucket, which has 1.
BUCKET = 1.5

WRAPPED = ("compiled inside", "compiled outside")


class Functional(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, *tensors, self.training, self.momentum, self.eps)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(4, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for norm in (nn.BatchNorm1d(WIDTH), Functional(WIDTH))
        )
        self.both = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sin() + self.second(x)
        return y + self.last(self.both(y).tanh())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Towers().double()


def train_on_the_whole_batch() -> dict[str, np.ndarray]:
    whole = model()
    _train(whole, whole, slice(None), 1.0)
    return state(whole)


def _train(run: nn.Module, learns: nn.Module, mine: slice, factor: float) -> None:
    optimizer = torch.optim.SGD(learns.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(sum(SIZES), 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        (run(x[mine]).square().mean(1).sum() * (factor / sum(SIZES))).backward()
        optimizer.step()


def _train_compiled(wrapped: str, backend: str) -> dict[str, np.ndarray]:
    torch.compiler.reset()
    rank = distributed.get_rank()
    converted = client.convert_model(model())
    if wrapped == "compiled inside":
        inside = torch.compile(converted, fullgraph=True, backend=backend)
        run: nn.Module = DistributedDataParallel(inside, bucket_cap_mb=BUCKET)
    else:
        run = torch.compile(DistributedDataParallel(converted, bucket_cap_mb=BUCKET), backend=backend)
    start = sum(SIZES[:rank])
    parts = []
    compile_parts = DDPOptimizer.compile_fn

    def counted(self: DDPOptimizer, *args: object, **kwargs: object) -> object:
        made = compile_parts(self, *args, **kwargs)
        parts.append(len(self.buckets))
        return made

    with mock.patch.object(DDPOptimizer, "compile_fn", counted):
        _train(run, converted, slice(start, start + SIZES[rank]), len(SIZES))
    return {"parts": np.array(max(parts)), **state(converted)}


def main() -> None:
    path, backend = sys.argv[1:]
    # With a shared cache a rank could load an unfinished file of another rank's compiler.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{path}.inductor.{os.environ['RANK']}"
    distributed.init_process_group("gloo")
    with client.connect(round_timeout=60.0):
        found = {
            f"{wrapped}/{name}": value
            for wrapped in WRAPPED
            for name, value in _train_compiled(wrapped, backend).items()
        }
        distributed.barrier()
    if distributed.get_rank() == 0:
        np.savez(path, **found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
