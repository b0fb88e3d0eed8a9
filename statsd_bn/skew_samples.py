"""Samples of rounds: rows of a few forward rounds, copied now, so that another thread computes their figures of skew.

    sampler.observe(now, key, counts, replicas, values)     # in each round
    ...
    samples = sampler.drain(now)                            # once a second

A member samples its group's rounds in memory, in the training thread, and its heartbeat thread drains the samples. The
server samples the rounds that it reduces, and drains them in a tick. A round costs a dictionary lookup, and a copy of
its rows if its layer is due; in shared memory the rows are overwritten two rounds later. All layers fall due at the
same moment, once a second, so usually one step provides the rows of all. If a step's first layers found no room, no
sample starts with its later layers: the first ones would be sampled far less often. Memory is bounded: a model with too
many layers is sampled in turns, and a wide layer at every second or third channel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from statsd_bn import limits
from statsd_bn.reduction import FloatArray, ignore_float_errors, is_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import compute_figures

# Sums and squares.
VECTORS = 2

# Interval at which each layer is sampled, if all fit.
SECONDS = 1.0

# Samples are drained so long after the first: a step that is not slow has reached all its layers by then.
SETTLE_SECONDS = 0.25

# Limits of one batch: layers, bytes, and bytes of one layer. A batch costs the training thread at most a millisecond.
MAX_LAYERS, MAX_BYTES, MAX_LAYER_BYTES = limits.MAX_SKEW_LAYERS, 2**22, 2**18

# Layers in the schedule; models have hundreds. Then the memory of one, with a long name.
MAX_SCHEDULED, SCHEDULED_BYTES = 4096, 512

# Turns are longer than necessary, so that a step's last layers never wait for the first ones.
SLACK = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The members' rows of one forward round.

    Attributes:
        counts: values per channel of each member, shape (members,), float64.
        values: sums and squares of each member, shape (members, 2, channels); channels may be left out.
    """

    key: RoundKey
    counts: FloatArray
    values: FloatArray


@dataclass(slots=True)
class _Batch:
    """The samples since the latest `drain`, all of one step."""

    started: float = math.inf
    samples: list[Sample] = field(default_factory=list)
    size: int = 0

    def has_room(self, key: RoundKey, size: int, max_bytes: int) -> bool:
        if not self.samples:
            return True
        is_of_step = key.step == self.samples[0].key.step
        return is_of_step and len(self.samples) < MAX_LAYERS and self.size + size <= max_bytes


class SkewSampler:
    """Samples of one group's rounds in one process.

    One thread at a time may `observe`, and another one `drain`, without a lock: one assignment hands the batch over.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_layer_bytes = min(MAX_LAYER_BYTES, max_bytes)
        # When a layer is due, and in which batch at the earliest: in slow steps the first layers would be due again
        # before the last ones have had their turn.
        self._due: dict[str, float] = {}
        self._turn: dict[str, int] = {}
        self._batches = 0
        self._batch = _Batch()
        self._drain_at = 0.0
        # The first round of its step without room.
        self._skipped: RoundKey | None = None
        # Number of batches in which all layers fit.
        self._turns = 0.0

    def observe(
        self, now: float, key: RoundKey, counts: Sequence[int], replicas: Sequence[int], values: FloatArray
    ) -> None:
        """Copies a round's rows if its layer is due.

        Args:
            now: the time, in seconds.
            key: of the round; only forward rounds are sampled.
            counts: values per channel of each row.
            replicas: rows of each member.
            values: shape (rows, vectors, channels); finite. Only a layer's rounds have two vectors.
        """
        if self.is_due(now, key) and values.shape[1] == VECTORS:
            self._add(now, key, counts, replicas, values)

    @property
    def size(self) -> int:
        """Memory in use, in bytes: rows, and the schedule."""
        return self._batch.size + SCHEDULED_BYTES * len(self._due)

    def is_due(self, now: float, key: RoundKey) -> bool:
        """Returns whether to sample a round."""
        is_time = now >= self._due.get(key.layer, 0.0) and key.is_forward
        return is_time and self._batches >= self._turn.get(key.layer, 0)

    def stride(self, size: int) -> int:
        """Returns the step between sampled channels, for rows of `size` bytes."""
        return max(1, math.ceil(size / self._max_layer_bytes))

    def drain(self, now: float) -> list[Sample]:
        """Returns the samples since the last call, of one step in the order of the rounds; at most once a second."""
        if now < max(self._drain_at, self._batch.started + SETTLE_SECONDS):
            return []
        batch, self._batch = self._batch, _Batch()
        self._drain_at = now + SECONDS
        self._batches += bool(batch.samples)
        return batch.samples

    def _add(
        self, now: float, key: RoundKey, counts: Sequence[int], replicas: Sequence[int], values: FloatArray
    ) -> None:
        stride = self.stride(values.nbytes)
        size = values.nbytes // stride
        self._schedule(key.layer, size)
        batch = self._batch
        if not batch.has_room(key, size, self._max_bytes):
            if self._skipped is None or self._skipped.step != key.step:
                self._skipped = key
            return  # it stays due, for the next batch
        if not batch.samples and self._has_skipped_earlier_layer(key):
            return
        seconds = SECONDS
        if self._turns > 1:
            seconds *= self._turns * SLACK
            self._turn[key.layer] = self._batches + math.ceil(self._turns)
        self._due[key.layer] = (now // seconds + 1) * seconds
        batch.started = min(now, batch.started)
        batch.size += size
        batch.samples.append(Sample(key, *_by_member(counts, replicas, values[..., ::stride])))

    def _has_skipped_earlier_layer(self, key: RoundKey) -> bool:
        skipped = self._skipped
        # If no step is ever counted, the skipped layer itself comes again.
        return skipped is not None and skipped.step == key.step and skipped.layer != key.layer

    def _schedule(self, layer: str, size: int) -> None:
        if layer in self._due:
            return
        if len(self._due) >= MAX_SCHEDULED:
            self._due.clear()
            self._turn.clear()
            self._turns = 0.0
        self._due[layer] = 0.0
        self._turns += max(1 / MAX_LAYERS, size / self._max_bytes)


@ignore_float_errors
def _by_member(counts: Sequence[int], replicas: Sequence[int], values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the counts and a copy of the values with one row for each member."""
    if len(replicas) == len(counts):
        return np.array(counts, np.float64), np.array(values)
    firsts = np.concatenate(([0], np.cumsum(replicas)[:-1])).astype(np.intp)
    return np.add.reduceat(np.array(counts, np.float64), firsts), np.add.reduceat(values, firsts, axis=0)


def figures_of_step(samples: Sequence[Sample]) -> tuple[int, dict[str, FloatArray]] | None:
    """Returns the samples' step, and the figures of their layers by name; None if there are no finite figures."""
    # Squares may be finite, and their sum not.
    computed = {sample.key.layer: compute_figures(sample.counts, sample.values) for sample in samples}
    figures = {layer: values for layer, values in computed.items() if is_finite(values)}
    return (samples[0].key.step, figures) if figures else None
