"""Rows of a round, and their sum in replica order.

Floating-point addition is not associative, so *the order is part of the result*. The server adds the rows of all
members in replica order (member number, then row within the member), never in arrival order; a process without a server
adds its replicas' rows with the same function. `round.c` in shared memory and `device_rows.py` on a device keep this
order. So four virtual replicas, four processes and a retried round give the same bits.

`Moments` interpret a layer's rows. A replica measures its slice stably, as a mean and a centred sum of squares (Chan,
Golub & LeVeque, "Algorithms for computing the sample variance", 1983), and converts them here, in float64, into the
sums that travel. A subtraction converts the sums back into a variance, with a relative error near
2^-53 * mean^2 / var. In float32 the error would be 2^-24 * mean^2 / var: no digit is correct at mean/std = 10,000.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import NamedTuple, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from statsd_bn import limits
from statsd_bn.checks import check_integer, check_values
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members

FloatArray = npt.NDArray[np.float64]
new = object.__new__


# Not frozen: a frozen class takes three times as long to set its fields, and each frame of a round makes an object.
@dataclass(slots=True, eq=False)
class Rows:
    """One member's rows for a round, one per replica.

    Attributes:
        counts: values per channel of each replica, exact integers >= 0.
        values: shape (replicas, vectors, channels), float64. A layer's forward round has the vectors Σx and Σx², its
            backward round Σdy and Σdy·(x-mean). A gather has one replica and one vector, made of the member's bytes.
    """

    counts: tuple[int, ...]
    values: FloatArray

    def __post_init__(self) -> None:
        check_integer("replicas", len(self.counts), 1, limits.MAX_REPLICAS)
        for count in self.counts:
            check_integer("count", count, 0, limits.MAX_COUNT)
        check_values(self.values, 3)
        if self.values.shape[0] != len(self.counts):
            raise ProtocolError(f"values: expected {len(self.counts)} rows, one per count, got {self.values.shape[0]}")

    @staticmethod
    def unchecked(counts: tuple[int, ...], values: FloatArray) -> "Rows":
        """Returns rows whose counts and shape the caller has checked."""
        made = new(Rows)
        made.counts, made.values = counts, values
        return made


P = ParamSpec("P")
R = TypeVar("R")

_ignores_errors = ContextVar("_ignores_errors", default=False)  # scoped to the context, like numpy 2's own setting


def ignore_float_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to compute with infinity and NaN without numpy's warnings; nested calls cost nothing."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _ignores_errors.get():
            return function(*args, **kwargs)
        with np.errstate(all="ignore"):
            before = _ignores_errors.set(True)
            try:
                return function(*args, **kwargs)
            finally:
                _ignores_errors.reset(before)

    return run


def sum_in_order(rows: Iterable[FloatArray]) -> FloatArray:
    """Returns ((row_0 + row_1) + row_2) + ... in float64, as a new array; takes one row or more, all of one shape."""
    first, *others = rows
    if not others:
        return np.array(first, dtype=np.float64)
    return _sum(first, others)


@ignore_float_errors
def _sum(first: FloatArray, others: list[FloatArray]) -> FloatArray:
    total = first.astype(np.float64, copy=False) + others[0]  # equal to `np.add` with a dtype, in a third of the time
    for row in others[1:]:
        total += row
    return total


def join_in_order(rows: Iterable[FloatArray]) -> FloatArray:
    """Returns rows concatenated along their last axis, bit for bit, as a new array."""
    return np.concatenate(list(rows), axis=-1)


def is_finite(values: FloatArray) -> bool:
    """Returns whether all values are finite."""
    # Called in every round: searching bytes takes a third of the time of `all`.
    return b"\0" not in np.isfinite(values).tobytes()


def non_finite_members(rows: Iterable[tuple[int, FloatArray]]) -> Members:
    """Returns the members with non-finite rows; `rows` has pairs of a member and some of its rows."""
    return Members.of({member for member, values in rows if not is_finite(values)})


class NonFiniteChannels(NamedTuple):
    """Non-finite channels of a sum; as text "4 of 256 channels (inf)"."""

    number: int
    channels: int
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number} of {self.channels} channels ({' and '.join(self.kinds)})"


def find_non_finite(values: FloatArray) -> NonFiniteChannels:
    """Returns the non-finite channels of a sum of shape (vectors, channels)."""
    # The first non-finite vector of a channel decides its kind: infinity may become NaN in later vectors.
    are_non_finite = ~np.isfinite(values)
    channels = np.flatnonzero(are_non_finite.any(axis=0))
    firsts = values[are_non_finite.argmax(axis=0)[channels], channels]
    kinds = tuple(name for name, is_kind in (("inf", np.isinf), ("NaN", np.isnan)) if is_kind(firsts).any())
    return NonFiniteChannels(len(channels), values.shape[1], kinds)


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, sums and sums of squares per channel.

    Attributes:
        count: values per channel, an exact integer >= 0.
        sums: shape (C,), float64: Σx.
        squares: shape (C,), float64: Σx².
    """

    count: int
    sums: FloatArray
    squares: FloatArray

    @classmethod
    def empty(cls, channels: int) -> Self:
        """Returns the moments of no values, the identity of `merge`."""
        return cls(0, np.zeros(channels), np.zeros(channels))

    @classmethod
    def from_centred(cls, count: int, mean: FloatArray, centred: FloatArray) -> Self:
        """Returns the moments of `count` values with this mean and Σ(x - mean)², each of shape (C,)."""
        return cls(count, count * mean, centred + count * mean * mean)

    @classmethod
    def from_vectors(cls, count: int, vectors: FloatArray) -> Self:
        """Returns the moments of a row: `vectors` has shape (2, C)."""
        return cls(count, vectors[0], vectors[1])

    @property
    def vectors(self) -> FloatArray:
        """The vectors of a row: shape (2, C), sums above squares."""
        return np.stack((self.sums, self.squares))

    def merge(self, other: Self) -> Self:
        """Returns the moments of both batches together."""
        sums, squares = sum_in_order((self.sums, other.sums)), sum_in_order((self.squares, other.squares))
        return type(self)(self.count + other.count, sums, squares)

    @cached_property
    def mean(self) -> FloatArray:
        """Shape (C,): Σx / n. Needs count >= 1."""
        return self.sums / self.count

    def variance(self, *, unbiased: bool = False) -> FloatArray:
        """Returns the variance per channel, never below 0.

        Args:
            unbiased: divide by n - 1 (as for `running_var`; needs count >= 2) instead of n (as for normalisation; needs
                count >= 1).

        Returns:
            Shape (C,). NaN if the input has NaN.
        """
        return self.centred / (self.count - unbiased)

    @cached_property
    def centred(self) -> FloatArray:
        """Shape (C,): Σ(x - mean)², never below 0. NaN if the input has NaN."""
        with np.errstate(all="ignore"):
            return np.maximum(self.squares - self.sums * self.sums / self.count, 0.0)
