"""Operators: the four steps of a synchronised layer as torch's operators alone, beside torch's own two.

No autograd, no bookkeeping, no exchange, and memory that was touched before: what the layer cannot fall below as long
as its steps are made of these operators. All take turns in one run, each with one and with two threads.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from client.kernels import cpu

SHAPES = ["32,64,56,56", "32,256,14,14", "8,2048,7,7", "4,64,112,112", "256,1024"]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
OURS = ("moments", "normalise", "backward_sums", "input_gradient")
TORCHS = ("forward", "backward")
WARM_UP = 3

# The C library keeps freed memory instead of giving it back to the system, so that no operator waits for fresh pages.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**33)}


def main() -> None:
    """Measures every combination and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="as 32,64,56,56")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", type=int, default=40, help="of each operator, per combination")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for case in _cases(options.shapes) for row in measure(case, options.threads, options.calls)]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'threads':>7} {'shape':>14} {'layout':>13} {'dtype':>8}",
        *(f"{name:>14}" for name in (*OURS, *TORCHS)),
        f"{'ours / torch':>12}",
    )
    for row in rows:
        print(
            f"{row['threads']:>7} {row['shape']:>14} {row['layout']:>13} {row['dtype']:>8}",
            *(f"{row[name]:>14.2f}" for name in (*OURS, *TORCHS)),
            f"{row['ratio']:>12.2f}",
        )


def _cases(shapes: list[str]) -> Iterator[dict[str, str]]:
    for dtype in ("float32", "bfloat16"):
        for shape in shapes:
            for layout in LAYOUTS if shape.count(",") > 1 else ["contiguous"]:
                yield {"shape": shape, "layout": layout, "dtype": dtype}


def measure(case: dict[str, str], threads: list[int], calls: int) -> list[dict[str, Any]]:
    """Returns a row for each number of threads: the medians of each operator's times in milliseconds."""
    ways = _ways(case)
    times: dict[tuple[int, str], list[float]] = {(number, name): [] for number in threads for name in ways}
    for _ in range(WARM_UP + calls):
        for number in threads:
            torch.set_num_threads(number)
            for name, run in ways.items():
                started = time.perf_counter()
                run()
                times[number, name].append((time.perf_counter() - started) * 1e3)
    rows = []
    for number in threads:
        medians = {name: statistics.median(times[number, name][WARM_UP:]) for name in ways}
        ratio = sum(medians[name] for name in OURS) / sum(medians[name] for name in TORCHS)
        rows.append({**case, "threads": number, **medians, "ratio": ratio})
    return rows


def _ways(case: dict[str, str]) -> dict[str, Callable[[], Any]]:
    shape = tuple(map(int, case["shape"].split(",")))
    dtype = getattr(torch, case["dtype"])
    x, grad = (torch.randn(shape, dtype=dtype).contiguous(memory_format=LAYOUTS[case["layout"]]) for _ in "xg")
    factor, addend, by_grad = np.random.default_rng(0).standard_normal((3, shape[1]))
    zero, one = torch.zeros(shape[1]), torch.ones(shape[1])
    forward, backward = torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward
    return {
        "moments": lambda: cpu.sums(x, x),
        "normalise": lambda: cpu.scale(x, factor, addend),
        "backward_sums": lambda: cpu.sums(grad, x),
        "input_gradient": lambda: cpu.combine(grad, x, by_grad, factor, addend),
        "forward": lambda: forward(x, one, zero, None, None, training=True, momentum=0.1, eps=1e-5),
        "backward": lambda: backward(grad, x, one, None, None, zero, one, train=True, eps=1e-5, output_mask=[True] * 3),
    }


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)  # noqa: S606 - itself
    main()
