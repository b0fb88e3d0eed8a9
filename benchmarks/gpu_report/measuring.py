"""Cost of a computation on the host and the device, by torch's profiler, CUDA's events and the clock.

On the CPU, which stands in for the GPU, similar figures are counted: operators instead of launches, reads of values
instead of synchronisations, and allocated bytes instead of the peak.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_report.step import Step

# Only events in this range of the profile count, because torch synchronises the device before and after the range.
RANGE = "gpu_report: measured"

# Reads of a tensor's value by the host.
READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"})


@dataclass(frozen=True)
class Counts:
    """Counts of the profiler, per run.

    Attributes:
        launches: of kernels, and of fills of device memory.
        copies: from host to device, back, or within the device.
        to_host: of these, the ones from device to host.
        waits: of the host for the device, a stream or an event, by a call that waits or by reading a value.
        busy: microseconds of kernels and copies on the device.
    """

    launches: float
    copies: float
    to_host: float
    waits: float
    busy: float


def wait_for(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def counted(device: torch.device, run: Callable[[], object], runs: int) -> tuple[Counts, profile]:
    """Runs a function in the profiler; returns its counts, and the profile itself.

    Args:
        device: on which the function runs.
        run: the function.
        runs: how often.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    wait_for(device)
    with profile(activities=activities) as profiler:
        with record_function(RANGE):
            for _ in range(runs):
                run()
        wait_for(device)
    return _counts(list(profiler.events() or []), runs, on_cuda=device.type == "cuda"), profiler


def _counts(events: list[torch.autograd.profiler_util.FunctionEvent], runs: int, *, on_cuda: bool) -> Counts:
    (range_,) = (event.time_range for event in events if event.name == RANGE and event.device_type == DeviceType.CPU)
    of_host = [
        event.name
        for event in events
        if event.device_type == DeviceType.CPU and range_.start <= event.time_range.start <= range_.end
    ]
    if not on_cuda:
        operators = [name for name in of_host if name.startswith("aten::")]
        reads = sum(name in READS for name in operators)
        return Counts(len(operators) / runs, operators.count("aten::copy_") / runs, 0.0, reads / runs, 0.0)
    work = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    copies = [event.name for event in work if event.name.startswith("Memcpy")]
    asked = sum(name.startswith("cu") and "Synchronize" in name for name in of_host)  # CUDA's runtime, or its driver
    return Counts(
        launches=(len(work) - len(copies)) / runs,
        copies=len(copies) / runs,
        to_host=sum("DtoH" in name for name in copies) / runs,
        waits=max(asked, sum(name in READS for name in of_host)) / runs,
        busy=sum(event.time_range.elapsed_us() for event in work) / runs,
    )


def check_counts(step: Step) -> None:
    """Checks that a launch, a copy to the host and both kinds of waits are counted; else all counts are wrong."""
    x = torch.ones(8, device=step.device)
    counted(step.device, x.sum, 1)  # the first profile loads libraries
    counts, _ = counted(step.device, lambda: x.sum().item(), 2)
    step.check("the profiler sees a launch and the read of a value", counts.launches and counts.waits >= 1, counts)
    if step.device.type == "cuda":
        step.check("the profiler sees a copy to the host", counts.to_host == 1, counts)
        counts, _ = counted(step.device, lambda: torch.cuda.current_stream().record_event().synchronize(), 2)
        step.check("the profiler sees a wait for an event", counts.waits == 1, counts)


def host_microseconds(device: torch.device, run: Callable[[], object], runs: int) -> float:
    """Returns the median time in which the host submits a run to the idle device."""
    times = []
    for _ in range(runs):
        wait_for(device)
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    wait_for(device)
    return statistics.median(times) * 1e6


def device_microseconds(device: torch.device, run: Callable[[], object], runs: int) -> float:
    """Returns the median time of consecutive runs on the device, with the gaps within a run."""
    if device.type != "cuda":
        return host_microseconds(device, run, runs)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    wait_for(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(events)) * 1e3


def peak_bytes(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the most device memory that a run allocates."""
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        return float(sum(max(0, event.self_cpu_memory_usage) for event in profiler.events() or []))
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    wait_for(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference of two tensors, as a share of the largest expected value."""
    scale = expected.double().abs().max()
    return float((found.double() - expected.double()).abs().max() / scale)
