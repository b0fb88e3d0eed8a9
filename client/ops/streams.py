"""Streams: on CUDA, the queue in which a device works through what it is given.

One thread computes for all replicas of a process, each on its own device. There it goes on in the stream of the
replica's own thread, where the input comes from; in another stream it could overtake the input.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


def current(x: Tensor) -> Any:
    """Returns the stream in which the calling thread's work on `x` is done; None where a device has none."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


@contextmanager
def entered(streams: Iterable[Any]) -> Iterator[None]:
    """Has this thread's work on the devices of some streams done in these."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def computed_in(streams: Sequence[Any], given: Iterable[Any], compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Returns the results of a part of a backward pass, computed in the replicas' streams.

    Autograd passes gradients in its thread's current streams, and expects the results there. So the replicas' streams
    first wait for the current ones, and the current ones wait for them at the end. Tensors that both use are recorded
    with the allocator, which could otherwise reuse their memory before the second stream has read it.

    Args:
        streams: of the replicas; empty on devices without streams.
        given: the inputs of the computation: tensors and other values.
        compute: returns tensors, and None.
    """
    if not streams:
        return compute()
    # Of several on one device that which was entered last counts, as in the forward pass.
    latest = {stream.device: stream for stream in streams}
    own = {device: torch.cuda.current_stream(device) for device in latest}
    others = {device: stream for device, stream in latest.items() if stream != own[device]}
    for device, stream in others.items():
        stream.wait_stream(own[device])
    _record_streams(given, others)
    with entered(others.values()):
        found = compute()
    for device, stream in others.items():
        own[device].wait_stream(stream)
    _record_streams(found, {device: own[device] for device in others})
    return found


def _record_streams(values: Iterable[Any], streams: Mapping[torch.device, Any]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.device in streams:
            value.record_stream(streams[value.device])
