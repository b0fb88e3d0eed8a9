"""Time of a synchronised layer in several processes on one GPU, relative to `torch.nn.SyncBatchNorm` there.

NCCL refuses two members on one device, so torch's layer exchanges over gloo, and ours in shared memory or over the
server: both through the host. The layers alternate call by call, and the result is the ratio of their medians. CUDA
events measure the device's time from the start of forward to the end of backward, with its waits. In further calls
torch's profiler measures the share of copies to and from the host in the device's busy time.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import client

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

SHAPES = ["32,64,56,56", "32,256,14,14", "8,2048,7,7"]
WARM_UP = 10
PROFILED = 10

Row = dict[str, Any]


def main() -> None:
    """Measures every combination and prints a table, or JSON; without a CUDA device it only says so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="of each member's slice, as 32,64,56,56")
    parser.add_argument("--calls", type=int, default=100, help="of each layer, per combination")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device", file=sys.stderr)
        return
    rows = [
        row for members in options.members for shape in options.shapes for row in measure(members, shape, options.calls)
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(torch.cuda.get_device_name())
    print(
        f"{'members':>7} {'shape':>14} {'layer':>14} {'device ms':>9} {'p99':>8} {'wall ms':>8} {'p99':>8} "
        f"{'busy ms':>8} {'to host':>8} {'to device':>9}"
    )
    for row in rows:
        print(
            f"{row['members']:>7} {row['shape']:>14} {row['layer']:>14} {row['device']:>9.2f} "
            f"{row['device_p99']:>8.2f} {row['wall']:>8.2f} {row['wall_p99']:>8.2f} {row['busy']:>8.2f} "
            f"{row['to_host']:>8.1%} {row['to_device']:>9.1%}"
        )


def measure(members: int, shape: str, calls: int) -> list[Row]:
    """Returns a row per layer: medians and p99 in milliseconds, and the shares of copies in the device's busy time."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _server(folder) as endpoint:
        queue: Queue[dict[str, Row]] = spawn.Queue()
        processes = [
            spawn.Process(target=_member, args=(rank, members, shape, calls, endpoint, folder, queue))
            for rank in range(members)
        ]
        for process in processes:
            process.start()
        found = [queue.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    return [_row(members, shape, layer, [result[layer] for result in found]) for layer in found[0]]


def _row(members: int, shape: str, layer: str, found: list[Row]) -> Row:
    row: Row = {"members": members, "shape": shape, "layer": layer}
    for clock in ("device", "wall"):
        times = sorted(milliseconds for result in found for milliseconds in result[clock])
        row[clock] = statistics.median(times)
        row[f"{clock}_p99"] = times[int(len(times) * 0.99)]
    for share in ("busy", "to_host", "to_device"):
        row[share] = statistics.mean(result[share] for result in found)
    return row


def _member(
    rank: int, members: int, shape: str, calls: int, endpoint: str, folder: str, queue: "Queue[dict[str, Row]]"
) -> None:
    torch.set_num_threads(1)
    sizes = [int(size) for size in shape.split(",")]
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", members), rank=rank, world_size=members)
    torch.cuda.set_device(0)
    torch.manual_seed(rank)
    x, factors = torch.randn(sizes, device="cuda", requires_grad=True), torch.randn(sizes, device="cuda")
    with client.connect(endpoint, rank=rank, world_size=members):
        layers = {
            "ours": client.convert_model(nn.Sequential(nn.BatchNorm2d(sizes[1]))).cuda(),
            "SyncBatchNorm": nn.SyncBatchNorm(sizes[1]).cuda(),
            "unsynchronised": nn.BatchNorm2d(sizes[1]).cuda(),
        }
        found: dict[str, Row] = {name: {"device": [], "wall": []} for name in layers}
        for call in range(WARM_UP + calls):
            outputs = {}
            for name, layer in layers.items():
                device, wall, outputs[name] = _timed(layer, x, factors)
                if call >= WARM_UP:
                    found[name]["device"].append(device)
                    found[name]["wall"].append(wall)
            torch.testing.assert_close(outputs["ours"], outputs["SyncBatchNorm"], rtol=1e-3, atol=1e-4)
        for name, layer in layers.items():
            found[name] |= _copies(layer, x, factors)
        dist.barrier()
    queue.put(found)
    queue.close()
    queue.join_thread()
    os._exit(0)  # shutting down gloo may wait for one of its threads for ever


def _timed(layer: nn.Module, x: Tensor, factors: Tensor) -> tuple[float, float, Tensor]:
    """Returns the milliseconds by the device's clock and by the host's, and the output."""
    x.grad = None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    begin.record()
    output = layer(x)
    output.backward(factors)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), (time.perf_counter() - started) * 1e3, output.detach()


def _copies(layer: nn.Module, x: Tensor, factors: Tensor) -> dict[str, float]:
    """Returns the busy milliseconds of the device per call, and the share of copies to and from the host in them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            _timed(layer, x, factors)
    work = [
        (event.name, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    busy = sum(microseconds for _, microseconds in work)
    to_host, to_device = (
        sum(microseconds for name, microseconds in work if kind in name) / busy
        for kind in ("Memcpy DtoH", "Memcpy HtoD")
    )
    return {"busy": busy / PROFILED / 1e3, "to_host": to_host, "to_device": to_device}


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
    main()
