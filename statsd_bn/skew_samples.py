"""Samples of rounds: copies of rows of a few forward rounds, so that another thread computes their skew.

    if sampler.is_due(now, key):                            # in each round
        sampler.observe(now, key, counts, replicas, values)
    ...
    samples = sampler.drain(now)                            # once a second

A member samples rounds in shared memory in the training thread, and its heartbeat thread drains the samples. The server
samples the rounds that it reduces, and drains them in a tick. All layers fall due at the same moment, once a second. A
layer is sampled if it was due when its forward pass began. So one pass usually provides all layers, in its order.
Memory is bounded: a model with too many layers is sampled in turns, and a wide layer at every n-th channel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from statsd_bn import limits
from statsd_bn.reduction import FloatArray, ignore_float_errors, is_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import compute_figures

VECTORS = 2  # sums and squares
SECONDS = 1.0  # interval at which each layer is sampled, if all fit

# Samples are drained this long after the first one: a step that is not slow has reached all its layers by then.
SETTLE_SECONDS = 0.25

# Limits of one batch: layers, bytes, and bytes of one layer. A batch costs the training thread at most a millisecond.
MAX_LAYERS, MAX_BYTES, MAX_LAYER_BYTES = limits.MAX_SKEW_LAYERS, 2**22, 2**18

# Layers in the schedule; models have hundreds. The bytes are those of one layer with a long name.
MAX_SCHEDULED, SCHEDULED_BYTES = 4096, 512

SLACK = 1.5  # lengthens a layer's interval: the first layers are due again only after the last ones have had a turn


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The members' rows of one forward round."""

    key: RoundKey
    counts: FloatArray  # values per channel of each member, shape (members,)
    values: FloatArray  # sums and squares of each member, shape (members, 2, channels); channels may be left out


@dataclass(slots=True)
class _Batch:
    """The samples since the latest `drain`, all of one forward pass."""

    number: int = 0  # of the pass
    started: float = math.inf
    samples: list[Sample] = field(default_factory=list)
    size: int = 0


class SkewSampler:
    """Samples of one group's rounds in one process."""

    # One thread at a time may `observe`, and another one `drain`, without a lock: one assignment hands the batch over.

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_layer_bytes = min(MAX_LAYER_BYTES, max_bytes)
        # When a layer is due, and in which batch at the earliest: otherwise the first layers of a slow step would be
        # due again before the last ones have had their turn.
        self._due: dict[str, tuple[float, int]] = {}
        self._batches = 0
        self._batch = _Batch()
        self._drain_at = 0.0
        # Step and first layer of the running pass, and the time of its first round.
        self._step, self._first_layer, self._pass_began = -1, "", 0.0
        # The number of the running forward pass, and of the latest one in which a round had no room.
        self._pass, self._skipped = 0, -1
        self._turns = 0.0  # number of batches in which all layers fit

    def observe(
        self, now: float, key: RoundKey, counts: Sequence[int], replicas: Sequence[int], values: FloatArray
    ) -> None:
        """Copies the finite rows of a round that `is_due`."""
        # `counts`: values per channel of each row; `replicas`: number of rows of each member. Only a layer's rounds
        # have two vectors.
        if values.shape[1] != VECTORS:
            return
        stride = self.stride(values.nbytes)
        size = values.nbytes // stride
        self._schedule(key.layer, size)
        batch = self._batch
        is_full = len(batch.samples) >= MAX_LAYERS or batch.size + size > self._max_bytes
        if batch.samples and (batch.number != self._pass or is_full):
            self._skipped = self._pass
        if self._skipped == self._pass:
            # The layer stays due, for the next batch. If a batch began in the middle of a pass, the first layers would
            # be sampled far less often than the last ones.
            return
        seconds, turn = SECONDS, 0
        if self._turns > 1:
            seconds *= self._turns * SLACK
            turn = self._batches + math.ceil(self._turns)
        self._due[key.layer] = (self._pass_began // seconds + 1) * seconds, turn
        batch.number, batch.started = self._pass, min(now, batch.started)
        batch.size += size
        batch.samples.append(Sample(key, *_by_member(counts, replicas, values[..., ::stride])))

    @property
    def size(self) -> int:
        """Memory in use, in bytes: rows, and the schedule."""
        return self._batch.size + SCHEDULED_BYTES * len(self._due)

    def is_due(self, now: float, key: RoundKey) -> bool:
        """Returns whether to sample a round; called in each round, because it notices where a forward pass begins."""
        if not key.is_forward:
            self._step = -1
            return False
        # Without backward rounds or a new step in between, a pass begins when the first layer runs again.
        if key.step != self._step or key.layer == self._first_layer:
            self._step, self._first_layer, self._pass_began = key.step, key.layer, now
            self._pass += 1
        due, turn = self._due.get(key.layer, (0.0, 0))
        return self._pass_began >= due and self._batches >= turn

    def stride(self, size: int) -> int:
        """Returns n for rows of `size` bytes: every n-th channel is sampled."""
        return max(1, math.ceil(size / self._max_layer_bytes))

    def drain(self, now: float) -> list[Sample]:
        """Returns the samples since the last call, of one pass in the order of the rounds; at most once a second."""
        if now < max(self._drain_at, self._batch.started + SETTLE_SECONDS):
            return []
        batch, self._batch = self._batch, _Batch()
        self._drain_at = now + SECONDS
        self._batches += bool(batch.samples)
        return batch.samples

    def _schedule(self, layer: str, size: int) -> None:
        if layer in self._due:
            return
        if len(self._due) >= MAX_SCHEDULED:
            self._due.clear()
            self._turns = 0.0
        self._due[layer] = 0.0, 0
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
    # Finite squares may have an infinite sum.
    computed = {sample.key.layer: compute_figures(sample.counts, sample.values) for sample in samples}
    figures = {layer: values for layer, values in computed.items() if is_finite(values)}
    return (samples[0].key.step, figures) if figures else None
