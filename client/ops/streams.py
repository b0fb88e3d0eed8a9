"""CUDA streams of the replicas of one process.

One thread computes for all replicas, each on its own device. It uses the stream of the replica's own thread, which
computes the input; in another stream the batch norm could read the input before it is complete.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


def current(x: Tensor) -> Any:
    """Returns the calling thread's stream on the device of `x`; None on devices without streams."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


@contextmanager
def entered(streams: Iterable[Any]) -> Iterator[None]:
    """Makes streams the current ones of this thread, each on its device."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def run_in(streams: Sequence[Any], arguments: Iterable[Any], compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Computes a part of a backward pass in the replicas' streams, and returns its results.

    Autograd passes gradients in its thread's current streams, and expects the results there. So the replicas' streams
    first wait for the current ones, and the current ones wait for them at the end. Tensors used by both are recorded
    with the allocator, which could otherwise reuse their memory before the second stream has read it.

    `streams` is empty on devices without streams. The tensors among `arguments` are the inputs of `compute`.
    """
    if not streams:
        return compute()
    # Of several streams on one device the last one counts, as in the forward pass.
    latest = {stream.device: stream for stream in streams}
    own = {device: torch.cuda.current_stream(device) for device in latest}
    others = {device: stream for device, stream in latest.items() if stream != own[device]}
    for device, stream in others.items():
        stream.wait_stream(own[device])
    _record_streams(arguments, others)
    with entered(others.values()):
        results = compute()
    for device, stream in others.items():
        own[device].wait_stream(stream)
    _record_streams(results, {device: own[device] for device in others})
    return results


def _record_streams(values: Iterable[Any], streams: Mapping[torch.device, Any]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.device in streams:
            value.record_stream(streams[value.device])
