"""A script under torchrun that trains each kind of wrapper twice; in the second run a late rank gets stack requests."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import client

STEPS, LATE = 4, 2
LATE_SECONDS = 4.0

Wrap = Callable[[nn.Module], nn.Module]


def ddp(**options: bool) -> Wrap:
    return lambda model: nn.parallel.DistributedDataParallel(model, **options)


def in_a_wrapper(model: nn.Module) -> nn.Module:
    return ddp()(nn.Sequential(ddp()(model), nn.Linear(1, 1)))


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def flat(model: nn.Module) -> nn.Module:
    """By FSDP's first version."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


WAYS: dict[str, Wrap] = {
    "defaults": ddp(),
    "static_graph": ddp(static_graph=True),
    "find_unused_parameters": ddp(find_unused_parameters=True),
    "gradient_as_bucket_view": ddp(gradient_as_bucket_view=True),
    "no_sync": ddp(),
    "nested": in_a_wrapper,
    "fully_shard": sharded,
    "FSDP": flat,
}


class Late(nn.Module):
    """Delays rank 0 before the following layers."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def train(way: str, *, late: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sleeper = Late()
    model = nn.Sequential(nn.Linear(4, 4), sleeper, nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = WAYS[way](client.convert_model(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = distributed.get_rank()
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        sleeper.seconds = LATE_SECONDS if late and step == LATE and rank == 0 else 0.0
        with model.no_sync() if way == "no_sync" and step % 2 == 0 else nullcontext():
            model(torch.randn(3, 4, generator=data)).square().mean().backward()
        optimizer.step()
    ends = (tensor.detach() for tensor in model.state_dict().values())
    return [end.to_local() if isinstance(end, DTensor) else end.clone() for end in ends]


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    with client.connect():
        for way in WAYS:
            plain, asked = train(way, late=False), train(way, late=True)
            same = all(map(torch.equal, plain, asked))
            sys.stdout.write(f"{way} {'same' if same else 'differs'}\n")
            sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
