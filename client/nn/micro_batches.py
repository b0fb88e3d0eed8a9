"""Deferred running statistics: a mini-batch that comes in micro-batches moves them once, as if it came in one piece.

Pipelines (GPipe: Huang et al., 2019, section 2.2) and gradient accumulation feed a mini-batch piece by piece. Each
piece is normalised by its own statistics. But moved by each of them, the running statistics would forget as many times
faster, and never see how far the pieces' means lie apart. So the pieces' moments are added, and move them at the end.
"""

import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

from client.ops.statistics import ChannelMoments
from statsd_bn.moments import Moments

_numbers = itertools.count(1)
_numbered: "WeakValueDictionary[int, Deferred]" = WeakValueDictionary()


class Deferred:
    """What one layer has seen of the present mini-batch.

    It belongs to the layer's buffers, so the replicas of one forward pass share it. What is pending is no state: a copy
    or a pickle of the layer begins with nothing.

    Args:
        chunks: micro-batches per mini-batch.

    Attributes:
        chunks: as given.
        number: which of this process's it is, for `numbered`.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.number = next(_numbers)
        self._pending: ChannelMoments | None = None
        self._calls = 0
        self._lock = threading.Lock()
        _numbered[self.number] = self

    def __reduce__(self) -> Any:
        """A copy of a layer that copies all its attributes, as of a parametrized one, begins with nothing."""
        return type(self), (self.chunks,)

    def add(self, micro_batch: ChannelMoments) -> ChannelMoments | None:
        """Adds a micro-batch; returns the moments of the mini-batch if this was the last of its `chunks`, else None."""
        with self._lock:
            self._pending = micro_batch if self._pending is None else self._pending.merge(micro_batch)
            self._calls += 1
            return self._taken() if self._calls == self.chunks else None

    def take(self) -> ChannelMoments | None:
        """Returns the moments of what came since the last mini-batch ended, None for nothing; the next one begins."""
        with self._lock:
            return self._taken()

    def _taken(self) -> ChannelMoments | None:
        taken, self._pending, self._calls = self._pending, None, 0
        return taken


def numbered(number: int) -> Deferred:
    """Returns the one with this number: where an operator runs, there are only plain values."""
    return _numbered[number]


def check_chunks(chunks: int) -> None:
    """Raises TypeError or ValueError where `chunks` is no number of micro-batches."""
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        raise TypeError(f"chunks: expected an int, the micro-batches per mini-batch, got {chunks!r}")
    if chunks < 1:
        raise ValueError(f"chunks: expected at least 1 micro-batch per mini-batch, got {chunks}")


class MomentAccumulator:
    """A layer's moments over many batches, while `recalibrate` runs a model over them.

    Attributes:
        moments: of all batches so far; None before the first.
    """

    def __init__(self) -> None:
        self.moments: Moments | None = None
        self._lock = threading.Lock()

    def add(self, batch: Moments) -> None:
        """Counts one more batch; replicas that never meet, as those of torch's own DataParallel, may do so at once."""
        with self._lock:
            self.moments = batch if self.moments is None else self.moments.merge(batch)
