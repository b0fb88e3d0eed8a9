"""Streams: on CUDA, the queue in which a device works through what it is given.

One thread computes for all replicas of a process, each on its own device. There it goes on in the stream of the
replica's own thread, where the input comes from; in another stream it could overtake the input.
"""

from collections.abc import Iterable, Iterator
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
