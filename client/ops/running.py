"""The running statistics that a forward pass moves."""

from typing import NamedTuple

from torch import Tensor


class Running(NamedTuple):
    """The buffers that move in a forward pass; each may be None, the first two only together.

    A `momentum` of NaN stands for the cumulative average, by the number of batches tracked.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    tracked: Tensor | None = None
    momentum: float = 0.0
