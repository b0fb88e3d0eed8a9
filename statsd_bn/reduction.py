"""The one place that adds rows, or puts them one behind the other.

Floating-point addition is not associative, so *the order is part of the result*. The master adds the rows of
all members in replica order (member number, then row within the member), never in arrival order; a process
without a master adds its replicas' rows through the same function. That is why four virtual replicas, four
processes and a retried round give the same bits.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def sum_in_order(rows: Iterable[FloatArray]) -> FloatArray:
    """Adds rows from left to right in float64.

    Args:
        rows: at least one array, all of one shape.

    Returns:
        A new array of that shape: `((row_0 + row_1) + row_2) + ...`.
    """
    first, *others = rows
    if not others:
        return np.array(first, dtype=np.float64)
    with np.errstate(all="ignore"):  # NaN and infinity pass through, as in torch
        second, *others = others
        total = np.add(first, second, dtype=np.float64)
        for row in others:
            total += row
    return total


def join_in_order(rows: Iterable[FloatArray]) -> FloatArray:
    """Puts rows one behind the other along their last axis, bit for bit.

    Args:
        rows: at least one array; of one shape, but for the last axis.

    Returns:
        A new array.
    """
    return np.concatenate(list(rows), axis=-1)
