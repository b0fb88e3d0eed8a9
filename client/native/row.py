"""NativeRow: what one pass of a layer brings to its round, computed, exchanged and used by the core in one call."""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from client.native.library import DONE, FINISH, MEASURE, NO_MEMORY
from statsd_bn.reduction import FloatArray, Rows


class Pass(NamedTuple):
    """What the core has for one pass, forward or backward, of calls that are alike.

    Attributes:
        room: makes room for its rows, and what follows them.
        alone: the function for the only rank.
        together: for one of several, whose others threads of this process may be: it releases the GIL.
    """

    room: Any
    alone: Any
    together: Any


class NativeRow:
    """The own row of a pass, and behind it the sum of all rows; each is two vectors and the count.

    Args:
        of: which pass.
        room: that it has made.
        count: values per channel.
        channels: C.
        arguments: what the function takes before the stage.

    Attributes:
        is_finished: whether the pass is computed to its end.
    """

    __slots__ = ("_arguments", "_channels", "_count", "_pass", "_room", "is_finished")

    def __init__(self, of: Pass, room: Any, count: int, channels: int, *arguments: Any) -> None:
        self._pass, self._room, self._count, self._channels = of, room, count, channels
        self._arguments = arguments
        self.is_finished = False

    def run(self, stage: int, group: Any = None, digest: int = 0, wait: int = 0) -> int:
        """Goes on with the pass; returns how the round stands, after which the pass is finished if it is DONE.

        Args:
            stage: MEASURE; EXCHANGE, in which the own row is the sum without a group; or FINISH.
            group: the pointer to an `sbn_group`.
            digest: of the round.
            wait: for the others, in nanoseconds at most.

        Raises:
            MemoryError: the core got no memory for vectors of one value per channel.
        """
        function = self._pass.alone if group is None else self._pass.together
        stands: int = function(*self._arguments, stage, group, digest, wait)
        if stands == NO_MEMORY:
            raise MemoryError("the native core got no memory for vectors of one value per channel")
        self.is_finished = stands == DONE and stage != MEASURE
        return stands

    def measured(self) -> Rows:
        """Computes the row, and returns it as it travels otherwise."""
        self.run(MEASURE)
        return self.brought

    @property
    def brought(self) -> Rows:
        """The row as it travels, once it is computed."""
        return Rows((self._count,), self._vectors(0)[np.newaxis])

    @property
    def total(self) -> FloatArray:
        """The sum of all rows, shape (2, C), in the memory of this."""
        return self._vectors(1)

    def _vectors(self, row: int) -> FloatArray:
        size = 2 * self._channels
        return np.frombuffer(self._room, offset=8 * row * (size + 1), count=size).reshape(2, -1)

    @property
    def total_at(self) -> int:
        """The address of the same."""
        return ctypes.addressof(self._room) + 8 * (2 * self._channels + 1)

    def finish(self, total: FloatArray, count: int) -> None:
        """Finishes the pass with the sum of all rows and its count, unless that is one value per channel."""
        self.total[:] = total
        self._room[4 * self._channels + 1] = count
        if count > 1:
            self.run(FINISH)
