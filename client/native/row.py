"""NativeRow: a pass of a layer whose row the core computes, exchanges and applies in one call."""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from client.native.library import DONE, FINISH, MEASURE, NO_MEMORY
from statsd_bn.reduction import FloatArray, Rows


class Pass(NamedTuple):
    """The functions of one pass, forward or backward, for calls with equal plans.

    Attributes:
        new_buffer: allocates the buffer of a pass.
        alone: the function for a single rank; it may hold the GIL.
        together: the function for one of several ranks. It releases the GIL: the other ranks may be threads of this
            process.
        values: number of values per channel.
        channels: C.
    """

    new_buffer: Any
    alone: Any
    together: Any
    values: int
    channels: int


class NativeRow:
    """One pass: the own row and the sum of all rows, each of two vectors and the count.

    Args:
        of: the pass.
        buffer: of the pass.
        arguments: the function's arguments before the stage.

    Attributes:
        is_finished: whether the pass is complete.
    """

    __slots__ = ("_arguments", "_buffer", "_pass", "is_finished")

    def __init__(self, of: Pass, buffer: Any, *arguments: Any) -> None:
        self._pass, self._buffer, self._arguments = of, buffer, arguments
        self.is_finished = False

    def run(self, stage: int, group: Any = None, digest: int = 0, wait: int = 0) -> int:
        """Runs the pass up to a stage and returns the state of its round.

        Args:
            stage: MEASURE, EXCHANGE or FINISH. EXCHANGE without a group uses the own row as the sum.
            group: the pointer to an `sbn_group`.
            digest: of the round.
            wait: for the other ranks, at most, in nanoseconds.

        Raises:
            MemoryError: the core could not allocate its vectors of one value per channel.
        """
        function = self._pass.alone if group is None else self._pass.together
        stands: int = function(*self._arguments, stage, group, digest, wait)
        if stands == NO_MEMORY:
            raise MemoryError("the native core could not allocate vectors of one value per channel")
        self.is_finished = stands == DONE and stage != MEASURE
        return stands

    def measured(self) -> Rows:
        """Computes the row, and returns it in the form of the other transports."""
        self.run(MEASURE)
        return self.brought

    @property
    def brought(self) -> Rows:
        """The computed row, in the form of the other transports."""
        return Rows((self._pass.values,), self._vectors(0)[np.newaxis])

    @property
    def total(self) -> FloatArray:
        """The sum of all rows, shape (2, C): a view of the buffer."""
        return self._vectors(1)

    def _vectors(self, row: int) -> FloatArray:
        size = 2 * self._pass.channels
        return np.frombuffer(self._buffer, offset=8 * row * (size + 1), count=size).reshape(2, -1)

    @property
    def total_at(self) -> int:
        """The address of `total`."""
        return ctypes.addressof(self._buffer) + 8 * (2 * self._pass.channels + 1)

    def finish(self, total: FloatArray, count: int) -> None:
        """Finishes the pass with the sum of all rows and their count; with a count of 1 the caller raises instead."""
        self.total[:] = total
        self._buffer[4 * self._pass.channels + 1] = count
        if count > 1:
            self.run(FINISH)
