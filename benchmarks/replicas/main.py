"""Time of virtual replicas in one process, forward and backward, relative to `nn.BatchNorm2d` on the whole batch.

The model is one layer; "wrapper" is `nn.Identity` in its place, so it measures splitting, threads and joining. The
models alternate call by call, so that other load slows all, and the result is the ratio of their medians. Each turn
starts with another model, since the first one finds cold caches. `--peer PATH` also measures the layer of a checkout of
Synchronized-BatchNorm-PyTorch. That library supports only CUDA devices, so on a CPU its layer runs in our wrapper: its
own callbacks register the replicas, and plain additions replace its two collectives.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import client
from client.data_parallel import any_device
from client.data_parallel.barrier import Barrier

CPU = torch.device("cpu")
WARM_UP = 5

Forward = Callable[[Tensor], Tensor]


def main() -> None:
    """Measures every combination and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--shape", default="8,64,56,56", help="of the whole batch, and again of a replica's slice")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch's threads per operator")
    parser.add_argument("--calls", type=int, default=100, help="of each layer, per combination")
    parser.add_argument("--peer", type=Path, help="a checkout of Synchronized-BatchNorm-PyTorch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    samples, *rest = map(int, options.shape.split(","))
    rows = [
        measure(replicas, [batch, *rest], threads, options.calls, options.peer)
        for threads in options.threads
        for replicas in options.replicas
        for batch in (samples, samples * replicas)
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'threads':>7} {'replicas':>8} {'whole batch':>15} {'ours ms':>8} {'p99':>7} {'wrapper':>8} {'torch ms':>8} "
        f"{'p99':>7} {'/ torch':>7} {'seed ms':>8} {'/ seed':>7}"
    )
    for row in rows:
        seed = f"{row['seed']:>8.2f} {row['ours'] / row['seed']:>7.2f}" if "seed" in row else f"{'-':>8} {'-':>7}"
        print(
            f"{row['threads']:>7} {row['replicas']:>8} {row['shape']:>15} {row['ours']:>8.2f} {row['ours_p99']:>7.2f} "
            f"{row['wrapper']:>8.2f} {row['torch']:>8.2f} {row['torch_p99']:>7.2f} "
            f"{row['ours'] / row['torch']:>7.2f} {seed}"
        )


def measure(replicas: int, shape: list[int], threads: int, calls: int, peer: Path | None) -> dict[str, Any]:
    """Returns median and p99 in milliseconds of each layer, for one combination."""
    torch.set_num_threads(threads)
    x, factors = torch.randn(shape, requires_grad=True), torch.randn(shape)
    layers: dict[str, Forward] = {
        "ours": client.DataParallelWithCallback(client.SynchronizedBatchNorm2d(shape[1]), ["cpu"] * replicas),
        "torch": nn.BatchNorm2d(shape[1]),
        "wrapper": client.DataParallelWithCallback(nn.Identity(), ["cpu"] * replicas),
    }
    if peer is not None:
        layers["seed"] = _seed(peer, shape[1], replicas)
    times: dict[str, list[float]] = {name: [] for name in layers}
    names = list(layers)
    for call in range(WARM_UP + calls):
        outputs = {}
        for name in names[call % len(names) :] + names[: call % len(names)]:
            milliseconds, outputs[name] = _timed(layers[name], x, factors)
            times[name] += [milliseconds] if call >= WARM_UP else []
        del outputs["wrapper"]
        for output in outputs.values():
            torch.testing.assert_close(output, outputs["torch"], rtol=1e-3, atol=1e-4)
    row: dict[str, Any] = {"threads": threads, "replicas": replicas, "shape": ",".join(map(str, shape))}
    for name, found in times.items():
        row[name] = statistics.median(found)
        row[f"{name}_p99"] = sorted(found)[int(len(found) * 0.99)]
    return row


def _timed(layer: Forward, x: Tensor, factors: Tensor) -> tuple[float, Tensor]:
    x.grad = None
    started = time.perf_counter()
    output = layer(x)
    output.backward(factors)
    return (time.perf_counter() - started) * 1e3, output.detach()


def _seed(peer: Path, channels: int, replicas: int) -> Forward:
    """Returns the layer of `peer` in virtual replicas, as its `DataParallelWithCallback` runs it on several GPUs."""
    if str(peer) not in sys.path:
        sys.path.insert(0, str(peer))
    batchnorm, replicate = (importlib.import_module(f"sync_batchnorm.{name}") for name in ("batchnorm", "replicate"))
    batchnorm.ReduceAddCoalesced, batchnorm.Broadcast = _ReduceAddCoalesced, _Broadcast
    layer = batchnorm.SynchronizedBatchNorm2d(channels)
    devices = [CPU] * replicas

    def forward(x: Tensor) -> Tensor:
        inputs, kwargs = any_device.scatter((x,), {}, devices, 0)
        copies = any_device.replicate(layer, devices)
        replicate.execute_replication_callbacks(copies)
        outputs = any_device.parallel_apply(copies, inputs, kwargs, devices, Barrier(len(copies), 60.0))
        return any_device.gather(outputs, CPU, 0)

    return forward


class _ReduceAddCoalesced:
    """Torch's function of this name for replicas that share a device."""

    @staticmethod
    def apply(_destination: int, kinds: int, *tensors: Tensor) -> list[Tensor]:
        return [torch.stack(tensors[kind::kinds]).sum(0) for kind in range(kinds)]


class _Broadcast:
    """Torch's function of this name for replicas that share a device."""

    @staticmethod
    def apply(targets: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors * len(targets)


if __name__ == "__main__":
    main()
