"""Time of a training step of a ResNet-18, relative to an unsynchronised one, in processes under DDP over gloo.

Six networks alternate step by step in each process, so that other load slows all alike. Ours run over a server, over a
server with DDP's broadcast of buffers, in shared memory, and over the process group. The others have torch's batch
norm, which is not synchronised, and a textbook synchronised batch norm, with an `all_reduce` of gloo forward and one
backward. The result is the ratio of their medians.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import client
from client.native.library import NativeRow
from client.session.connection import Connection
from client.session.round import Round
from client.transports import choose
from client.transports.server import SlavePipe
from client.transports.shared_memory import SharedMemoryPipe

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

WARM_UP = 3

# Our networks, and the transport of their rows.
OURS = {"server": SlavePipe, "memory": SharedMemoryPipe}
CLASSES = 10

# Further networks of ours, whose rounds are not measured.
BROADCAST, GROUP = "server, broadcast", "process group"

Times = dict[str, list[float]]


def main() -> None:
    """Measures the steps and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--shape", default="8,3,64,64", help="of each member's batch")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = [int(size) for size in options.shape.split(",")]
    found = measure(options.members, shape, options.width, options.steps)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'way':>17} {'step ms':>9} {'p99':>9} {'/ unsynchronised':>17}")
    for way in ("unsynchronised", *OURS, BROADCAST, GROUP, "gloo"):
        ratio = found[way] / found["unsynchronised"]
        print(f"{way:>17} {found[way]:>9.1f} {found[f'{way}_p99']:>9.1f} {ratio:>17.3f}")
    for way in OURS:
        print(
            f"{way}, {found['rounds']} rounds: {found[f'{way}_in_rounds']:.1f} ms; "
            f"without the wait for a slower member: {found[f'{way}_exchanging']:.1f} ms"
        )


def measure(members: int, shape: list[int], width: int, steps: int) -> dict[str, Any]:
    """Returns median and p99 of a step in milliseconds for each way, and the time of our rounds within a step.

    The last member of a round waits for no other, so the shortest of the members' times is that of the exchange.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _server(folder) as endpoint:
        queue: Queue[Times] = spawn.Queue()
        processes = [
            spawn.Process(target=_member, args=(rank, members, shape, width, steps, endpoint, folder, queue))
            for rank in range(members)
        ]
        for process in processes:
            process.start()
        found = [queue.get(timeout=60 + 60 * steps) for _ in processes]
        for process in processes:
            process.join()
    row: dict[str, Any] = {"members": members, "shape": shape, "width": width}
    for way in (*OURS, BROADCAST, GROUP, "unsynchronised", "gloo"):
        times = sorted(milliseconds for result in found for milliseconds in result[way])
        row[way] = statistics.median(times)
        row[f"{way}_p99"] = times[int(len(times) * 0.99)]
    for way in OURS:
        row["rounds"] = len(found[0][f"{way} rounds"]) // steps
        together = list(zip(*(result[f"{way} rounds"] for result in found), strict=True))
        row[f"{way}_in_rounds"] = sum(map(statistics.mean, together)) / steps
        row[f"{way}_exchanging"] = sum(map(min, together)) / steps
    return row


def _member(
    rank: int,
    members: int,
    shape: list[int],
    width: int,
    steps: int,
    endpoint: str,
    folder: str,
    queue: "Queue[Times]",
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", members), rank=rank, world_size=members)
    in_rounds = _timed_rounds()
    with client.connect(endpoint, rank=rank, world_size=members):
        ways = {
            **{way: _in_transport(transport, client.convert_model(_network(width))) for way, transport in OURS.items()},
            BROADCAST: _in_transport(SlavePipe, client.convert_model(_network(width)), broadcasts=True),
            GROUP: _trainer(client.convert_model(_network(width), process_group=dist.group.WORLD)),
            "unsynchronised": _trainer(_network(width), broadcasts=True),
            "gloo": _trainer(_network(width, GlooBatchNorm), broadcasts=True),
        }
        torch.manual_seed(rank)
        images, labels = torch.randn(shape), torch.randint(CLASSES, shape[:1])
        times: Times = {way: [] for way in ways} | {f"{way} rounds": [] for way in OURS}
        losses: dict[str, Tensor] = {}
        for step in range(WARM_UP + steps):
            turns = [*list(ways)[step % len(ways) :], *list(ways)[: step % len(ways)]]
            for way in turns:
                in_rounds.clear()
                milliseconds, losses[way] = _timed(partial(ways[way], images, labels))
                times[way] += [milliseconds] if step >= WARM_UP else []
                if way in OURS and step >= WARM_UP:
                    times[f"{way} rounds"] += in_rounds
            if step == 1:  # the step after the first backward pass
                torch.testing.assert_close(losses["server"], losses["gloo"], rtol=1e-3, atol=1e-3)
            assert losses["server"] == losses["memory"] == losses[GROUP]  # noqa: S101 - the same bits
        dist.barrier()
    queue.put(times)
    queue.close()
    queue.join_thread()
    os._exit(0)  # shutting down gloo may wait for one of its threads for ever


def _timed(step: Callable[[], Tensor]) -> tuple[float, Tensor]:
    dist.barrier()
    started = time.perf_counter()
    loss = step()
    return (time.perf_counter() - started) * 1e3, loss


def _timed_rounds() -> list[float]:
    """Returns a list to which each round of this process adds its milliseconds, without the layer's computation."""
    found: list[float] = []
    in_core = [0.0]
    started = [0.0]
    begin, end, run = Connection.round, Round.__exit__, NativeRow.run

    def begin_timed(*arguments: Any) -> Round:
        started[0] = time.perf_counter()
        return begin(*arguments)

    def end_timed(round_: Round, *arguments: Any) -> None:
        end(round_, *arguments)
        seconds = time.perf_counter() - started[0]
        if round_.native_seconds is not None:  # one call of the core exchanges and computes
            seconds -= in_core[0] - round_.native_seconds
        found.append(seconds * 1e3)

    def timed_run(*arguments: Any) -> int:
        began = time.perf_counter()
        state = run(*arguments)
        in_core[0] = time.perf_counter() - began
        return state

    Connection.round = begin_timed  # type: ignore[method-assign, assignment]
    Round.__exit__ = end_timed  # type: ignore[method-assign, assignment]
    NativeRow.run = timed_run  # type: ignore[method-assign]
    return found


def _in_transport(
    transport: type[SlavePipe], network: nn.Module, *, broadcasts: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that selects a transport for this process, and trains a network by one step over it."""
    train = _trainer(network, broadcasts=broadcasts)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        choose.SharedMemoryPipe = transport  # type: ignore[misc] # the class that is chosen with a connection
        return train(images, labels)

    return step


def _trainer(network: nn.Module, *, broadcasts: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that trains a network by one step; with `broadcasts`, DDP broadcasts buffers before it."""
    model = DistributedDataParallel(network)
    model.broadcast_buffers = broadcasts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _network(width: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Returns a ResNet-18 whose stem halves the image once: 20 batch norms."""
    torch.manual_seed(0)
    stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
    blocks = [
        block
        for before, after, stride in stages
        for block in (Block(before, after, stride, norm), Block(after, after, 1, norm))
    ]
    stem = [nn.Conv2d(3, width, 3, 2, padding=1, bias=False), norm(width), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


class Block(nn.Module):
    """Two convolutions and a shortcut; shapes (N, before, H, W) to (N, after, H / stride, W / stride)."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            norm(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            norm(after),
        )
        self.around = (
            nn.Identity()
            if before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input of the next block."""
        return F.relu(self.convolutions(x) + self.around(x), inplace=True)


class GlooBatchNorm(nn.BatchNorm2d):
    """Synchronised batch norm in training, from the formula and torch's operators; see `_GlooBatchNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x`, shape (N, C, H, W), with the statistics of all members' batches."""
        output, mean, variance, count = _GlooBatchNorm.apply(x, self.weight, self.bias, self.eps)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        return output


class _GlooBatchNorm(torch.autograd.Function):
    """One all_reduce of Σx, Σx² and n forward, one of Σdy and Σdy·(x - mean)·invstd backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        channels = x.shape[1]
        sums = torch.cat((x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), x.new_full((1,), x.numel() / channels)))
        dist.all_reduce(sums)
        count = sums[-1]
        mean = sums[:channels] / count
        variance = sums[channels:-1] / count - mean.square()
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt(), count)
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        image = (1, -1, 1, 1)
        normalised = (x - mean.view(image)) * invstd.view(image)
        local = torch.stack((grad.sum((0, 2, 3)), (grad * normalised).sum((0, 2, 3))))
        total = local.clone()
        dist.all_reduce(total)
        first, second = (total / count).unbind()
        scale = (weight * invstd).view(image)
        return scale * (grad - first.view(image) - normalised * second.view(image)), local[1], local[0], None


@contextmanager
def _server(folder: str) -> Iterator[str]:
    endpoint = f"ipc://{Path(folder) / 'server'}"
    command = [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own server
        assert server.stdout is not None  # noqa: S101 - it is a pipe
        try:
            server.stdout.readline()
            yield endpoint
        finally:
            server.terminate()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
