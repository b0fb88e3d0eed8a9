"""Trainings as users write them, which tests start by torchrun, by mp.spawn, or as a plain script.

    python anywhere_programs.py NAME[,NAME ...] [PROCESSES STORE]

With a number of processes it spawns them, and they rendezvous in a file. Results are lines "rank 0, NAME: ..." on
stdout.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import client
from client.session import groups

STEPS = 5


class Network(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))


class Wrapped(nn.Module):
    """A wrapper in a wrapper, and a layer outside of the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(client.convert_model(Network()))
        self.norm = client.SynchronizedBatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


_running = [""]


def print_line(*found: object) -> None:
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    # In one piece, since the ranks share stdout.
    sys.stdout.write(f"rank {rank}, {_running[0]}: {' '.join(map(str, found))}\n")
    sys.stdout.flush()


def batches(count: int = STEPS, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * distributed.get_rank() + seed)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def train(model: nn.Module, data: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def digest(model: nn.Module) -> str:
    return digest_of(model.state_dict().values())


def digest_of(values: Iterable[torch.Tensor]) -> str:
    every = hashlib.sha256()
    for value in values:
        every.update(value.numpy().tobytes())
    return every.hexdigest()[:16]


def broadcasts(wrapper: Any) -> list[int]:
    counted = [0]
    sync = wrapper._sync_buffers

    def counting() -> None:
        counted[0] += 1
        sync()

    wrapper._sync_buffers = counting
    return counted


def ddp(*, broadcast_buffers: bool = True, **options: Any) -> None:
    model = DistributedDataParallel(client.convert_model(Network()), **options)
    model.broadcast_buffers = broadcast_buffers  # newer versions of torch warn of the argument
    counted = broadcasts(model)
    with client.connect():
        train(model, batches())
        print_line("broadcasts", *counted, "digest", digest(model.module))
        distributed.barrier()


def no_broadcast() -> None:
    ddp(broadcast_buffers=False)


def static_graph() -> None:
    ddp(static_graph=True)


def find_unused_parameters() -> None:
    ddp(find_unused_parameters=True)


def gradient_as_bucket_view() -> None:
    ddp(gradient_as_bucket_view=True)


def no_sync() -> None:
    """Torch broadcasts no buffers in a pass that follows a pass under `no_sync`."""
    model = DistributedDataParallel(client.convert_model(Network()))
    counted = broadcasts(model)
    with client.connect():
        for _ in range(STEPS):
            first, second = batches(2)
            with model.no_sync():
                model(first).square().mean().backward()
            model(second).square().mean().backward()
        print_line("broadcasts", *counted, "digest", digest(model.module))
        distributed.barrier()


def nested() -> None:
    model = DistributedDataParallel(Wrapped())
    inner, outer = broadcasts(model.module.inner), broadcasts(model)
    with client.connect():
        train(model, batches())
        print_line("broadcasts", *inner, *outer, "digest", digest(model.module.inner.module))
        distributed.barrier()


def smart() -> None:
    with client.connect():
        model = client.smart_ddp(Network())
        counted = broadcasts(model)
        train(model, batches())
        print_line("broadcasts", *counted, "digest", digest(model.module))
        distributed.barrier()


def sharded() -> None:
    """Each layer's parameters are gathered before its forward pass, and its buffers are whole on each rank."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - torch 2.6 and later

    model = client.convert_model(Network())
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in (model[0], model[1], model[3], model[4]):
        fully_shard(layer, mesh=mesh)
    _train_sharded(fully_shard(model, mesh=mesh))


def flat() -> None:
    """By FSDP's first version."""
    _train_sharded(FullyShardedDataParallel(client.convert_model(Network()), device_id=torch.device("cpu")))


def _train_sharded(model: nn.Module) -> None:
    with client.connect():
        train(model, batches())
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        print_line("digest", digest_of(state.values()))
        distributed.barrier()


def rank_0_evaluates() -> None:
    """A pass in eval on one rank alone, which torch's broadcast would break."""
    model = client.smart_ddp(Network(), static_graph=False)
    with client.connect():
        for _ in range(3):
            train(model, batches())
            if distributed.get_rank() == 0:
                model.eval()(batches()[0])
                model.train()
        print_line("digest", digest(model.module))
        distributed.barrier()


def unconnected() -> None:
    network = client.convert_model(Network())
    train(DistributedDataParallel(network), batches())
    print_mean(network)


def alone() -> None:
    model = client.convert_model(Network())
    with client.connect() as connection:
        train(model, [torch.randn(4, 3)] * 2)
        print_line(connection.endpoint, connection.rank_and_size, connection.all_gather("x", b"y"))


def too_early() -> None:
    """Connected before there is a process group, so alone."""
    with client.connect():
        initialise()
        network = client.convert_model(Network())
        train(network, batches(1))
        print_mean(network)


def print_mean(network: nn.Module) -> None:
    print_line("running mean", next(network.buffers()).tolist())


def local() -> None:
    """Each rank claims to run on the machine that MACHINES lists for it; the test has only one machine."""
    machines, rank = os.environ["MACHINES"].split(","), distributed.get_rank()
    inputs = [torch.randn(8, 3, generator=torch.Generator().manual_seed(each)) for each in range(len(machines))]
    expected = nn.BatchNorm1d(3)
    expected(torch.cat([inputs[each] for each, machine in enumerate(machines) if machine == machines[rank]]))
    with client.connect() as connection:
        groups.BOOT_ID = Path(machines[rank])
        for group in ("local", None):  # the ranks find "local" in the first layer's forward pass
            layer = client.SynchronizedBatchNorm1d(3, group=group or client.local_group())
            torch.compile(layer, backend="aot_eager", fullgraph=True)(inputs[rank])
            torch.testing.assert_close(layer.running_var, expected.running_var)
            torch.testing.assert_close(layer.running_mean, expected.running_mean)
        print_line(client.local_group(), connection.rounds)


def run(names: str) -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    if names not in {"alone", "too_early"}:
        initialise()
    for name in names.split(","):
        _running[0] = name
        globals()[name]()
    if distributed.is_initialized():
        distributed.destroy_process_group()
        # gloo's threads outlive the group, and sometimes abort an interpreter during its shutdown (pytorch#179291).
        sys.stdout.flush()
        os._exit(0)


def initialise() -> None:
    given = os.environ.get("SPAWNED")
    if given is None:
        distributed.init_process_group("gloo")
        return
    rank, size, store = given.split(" ", 2)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))


def spawned(rank: int, names: str, size: int, store: str) -> None:
    os.environ["SPAWNED"] = f"{rank} {size} {store}"
    run(names)


if __name__ == "__main__":
    programs, *how = sys.argv[1:]
    if how:
        multiprocessing.spawn(spawned, (programs, int(how[0]), how[1]), nprocs=int(how[0]))
    else:
        run(programs)
