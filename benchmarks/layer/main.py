"""Time of a synchronised layer, forward and backward, relative to `nn.BatchNorm2d` on the same slice.

With one member the measurement covers the whole layer (bookkeeping, autograd and kernels) and an exchange that costs
nothing: a patched layer synchronises over the in-process transport with itself alone. With more members, each
member is a process, and they exchange in shared memory or over a server. The layers alternate call by call, so that
other load slows both, and the result is the ratio of their medians. Then `subclasses` measures converted subclasses.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import subclasses
import torch
from torch import Tensor, nn

import client

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

SHAPES = ["32,64,56,56", "32,256,14,14", "8,2048,7,7", "4,64,112,112", "256,1024"]
WARM_UP = 3

# Layouts that a shape can have.
LAYOUTS = ["contiguous", "channels_last"]

Times = dict[str, list[float]]


def main() -> None:
    """Measures every combination and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="as 32,64,56,56")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", type=int, default=30, help="of each layer, per combination")
    parser.add_argument("--subclass-calls", type=int, default=150, help="of each subclass in each process; 0: none")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(case, options.calls) for case in _cases(options)]
    of_subclasses = subclasses.measured(options.subclass_calls) if options.subclass_calls else []
    if options.json:
        print(json.dumps({"layers": rows, "subclasses": of_subclasses}, indent=2))
        return
    print(
        f"{'members':>7} {'threads':>7} {'shape':>14} {'layout':>13} {'dtype':>8} {'ours ms':>8} {'p99':>8} "
        f"{'torch ms':>8} {'p99':>8} {'ratio':>6} {'MB more':>8} {'torch':>8}"
    )
    for row in rows:
        print(
            f"{row['members']:>7} {row['threads']:>7} {row['shape']:>14} {row['layout']:>13} {row['dtype']:>8} "
            f"{row['ours']:>8.2f} {row['ours_p99']:>8.2f} {row['torch']:>8.2f} {row['torch_p99']:>8.2f} "
            f"{row['ratio']:>6.2f} {row['ours_peak']:>8.1f} {row['torch_peak']:>8.1f}"
        )
    if of_subclasses:
        print(f"{'shape':>9} {'class':>12} {'plain us':>8} {'converted us':>12} {'more than ours':>14}")
    for row in of_subclasses:
        print(
            f"{row['shape']:>9} {row['class']:>12} {row['plain']:>8.0f} {row['converted']:>12.0f} {row['more']:>14.1f}"
        )


def _cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for members in options.members:
        for threads in options.threads if members == 1 else [1]:
            for dtype in options.dtypes:
                for shape in options.shapes:
                    for layout in options.layouts if shape.count(",") > 1 else LAYOUTS[:1]:
                        yield {
                            "members": members,
                            "threads": threads,
                            "shape": shape,
                            "layout": layout,
                            "dtype": dtype,
                        }


def measure(case: dict[str, Any], calls: int) -> dict[str, Any]:
    """Returns the case with median and p99 of both layers in milliseconds, and the peak of their tensors in MB."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _server(folder) as endpoint:
        queue: Queue[tuple[Times, dict[str, float]]] = spawn.Queue()
        start = spawn.Barrier(case["members"])
        members = [
            spawn.Process(target=_member, args=(rank, case, calls, endpoint, start, queue))
            for rank in range(case["members"])
        ]
        for member in members:
            member.start()
        found = [queue.get(timeout=300) for _ in members]
        for member in members:
            member.join()
    row = dict(case)
    for way in ("ours", "torch"):
        times = sorted(seconds * 1e3 for result, _ in found for seconds in result[way])
        row[way] = statistics.median(times)
        row[f"{way}_p99"] = times[int(len(times) * 0.99)]
        row[f"{way}_peak"] = max(peaks[way] for _, peaks in found)
    row["ratio"] = row["ours"] / row["torch"]
    return row


def _member(
    rank: int,
    case: dict[str, Any],
    calls: int,
    endpoint: str,
    start: "Barrier",
    queue: "Queue[tuple[Times, dict[str, float]]]",
) -> None:
    torch.set_num_threads(case["threads"])
    torch.manual_seed(rank)
    if case["members"] == 1:
        with mock.patch.object(client.SynchronizedBatchNorm, "_must_synchronise", _believe):
            queue.put(_both_layers(case, calls, start))
        return
    with client.connect(endpoint, rank=rank, world_size=case["members"]):
        queue.put(_both_layers(case, calls, start))


def _believe(*_: Any) -> bool:
    return True


def _both_layers(case: dict[str, Any], calls: int, start: "Barrier") -> tuple[Times, dict[str, float]]:
    shape = tuple(map(int, case["shape"].split(",")))
    is_image = len(shape) > 2
    layout = getattr(torch, f"{case['layout']}_format" if case["layout"] == "contiguous" else case["layout"])
    x, grad = (torch.randn(shape, dtype=getattr(torch, case["dtype"])).contiguous(memory_format=layout) for _ in "xg")
    ours = client.SynchronizedBatchNorm2d if is_image else client.SynchronizedBatchNorm1d
    plain = nn.BatchNorm2d if is_image else nn.BatchNorm1d
    steps = {way: _step(layer(shape[1]), x, grad) for way, layer in (("ours", ours), ("torch", plain))}
    times: Times = {way: [] for way in steps}
    peaks = {}
    for call in range(WARM_UP + calls + 1):
        turns = list(steps.items())
        for way, run in turns if call % 2 else reversed(turns):  # the order makes a difference
            if call == WARM_UP + calls:
                peaks[way] = _peak(run)
                continue
            start.wait()  # else an early member's exchange would include its wait for the others
            started = time.perf_counter()
            run()
            if call >= WARM_UP:
                times[way].append(time.perf_counter() - started)
    return times, peaks


def _step(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    leaf = x.clone().requires_grad_()

    def run() -> None:
        layer(leaf).backward(grad)
        leaf.grad = None

    return run


def _peak(run: Callable[[], None]) -> float:
    """Returns the peak of the tensors that a step allocates, in MB."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / 1e6


@contextmanager
def _server(folder: str) -> Iterator[str]:
    arguments = [sys.executable, "-m", "server", "--bind", f"ipc://{folder}/server", "--log-level", "error"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own server
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    main()
