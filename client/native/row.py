"""NativeRow: a pass of a layer whose row the core computes, exchanges and applies in one call."""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from client.native.library import DONE, FINISH, MEASURE, NO_MEMORY
from statsd_bn.reduction import FloatArray, Rows


class Pass(NamedTuple):
    """The functions of one pass, forward or backward, for calls with equal plans."""

    new_buffer: Any  # allocates the buffer of a pass
    alone: Any  # the function for a single rank; it may hold the GIL
    together: Any  # for one of several ranks; it releases the GIL, since others may be threads of this process
    values: int  # per channel
    channels: int


class NativeRow:
    """One pass: the own row and the sum of all rows, each of two vectors and the count.

    `arguments` are the function's arguments before the stage. `is_finished`: whether the pass is complete.
    """

    __slots__ = ("_arguments", "_buffer", "_pass", "is_finished")

    def __init__(self, of: Pass, buffer: Any, *arguments: Any) -> None:
        self._pass, self._buffer, self._arguments = of, buffer, arguments
        self.is_finished = False

    def run(self, stage: int, group: Any = None, digest: int = 0, wait: int = 0) -> int:
        """Run the pass up to a stage, for `wait` nanoseconds at most, and return the state of its round.

        EXCHANGE without a group, the pointer to an `sbn_group`, uses the own row as the sum.
        """
        function = self._pass.alone if group is None else self._pass.together
        state: int = function(*self._arguments, stage, group, digest, wait)
        if state == NO_MEMORY:
            raise MemoryError("the native core could not allocate vectors of one value per channel")
        self.is_finished = state == DONE and stage != MEASURE
        return state

    def measured(self) -> Rows:
        """Compute the row, and return it in the form of the other transports."""
        self.run(MEASURE)
        return self.contribution

    @property
    def contribution(self) -> Rows:
        """The computed row, in the form of the other transports."""
        return Rows((self._pass.values,), self._vectors(0)[np.newaxis])

    @property
    def total(self) -> FloatArray:
        """Sum of all rows, shape (2, C): a view of the buffer."""
        return self._vectors(1)

    def _vectors(self, row: int) -> FloatArray:
        size = 2 * self._pass.channels
        return np.frombuffer(self._buffer, offset=8 * row * (size + 1), count=size).reshape(2, -1)

    @property
    def total_at(self) -> int:
        """Address of `total`."""
        return ctypes.addressof(self._buffer) + 8 * (2 * self._pass.channels + 1)

    def finish(self, total: FloatArray, count: int) -> None:
        """Finish the pass with the sum of all rows and their count; with a count of 1 the caller raises instead."""
        self.total[:] = total
        self._buffer[4 * self._pass.channels + 1] = count
        if count > 1:
            self.run(FINISH)
