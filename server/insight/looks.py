"""Looks: some rows of the rounds that come to the server, kept for the figures of skew."""

from collections.abc import Sequence

import numpy as np

from statsd_bn.reduction import FloatArray, is_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.skew_samples import VECTORS, Samples, told_by

# What is kept of one step's rows; of what is more, fewer channels and layers.
MOST_BYTES = 2**18


class Looks:
    """Those of one group."""

    def __init__(self) -> None:
        self._samples = Samples(MOST_BYTES)

    def are_due(self, now: float, key: RoundKey) -> bool:
        """Whether to keep something of a round."""
        return self._samples.is_due(now, key)

    @property
    def kept(self) -> int:
        """How many bytes are kept: rows, `MOST_BYTES` at most, and the names of layers."""
        return self._samples.size

    def add(self, now: float, key: RoundKey, rows: Sequence[Rows]) -> None:
        """Keep something of what all members have brought, in their order, if it is of a layer, and finite."""
        if rows[0].values.shape[1] != VECTORS:
            return
        stride = self._samples.stride(sum(one.values.nbytes for one in rows))
        values = np.concatenate([one.values[..., ::stride] for one in rows])
        if is_finite(values):
            counts = [count for one in rows for count in one.counts]
            self._samples.look(now, key, counts, [len(one.counts) for one in rows], values)

    def take(self, now: float) -> tuple[int, dict[str, FloatArray]] | None:
        """The step that was looked at, and the figures of its layers by name; None where nothing is due."""
        return told_by(self._samples.take(now))
