"""Samples: the rows of a few rounds, kept until somebody has time to compute the figures of skew from them.

    samples.look(now, key, counts, replicas, values)     # in each round
    ...
    look = samples.take(now)                             # once a second

A member looks at its group's rounds in memory, in the thread that trains, and its heartbeat's thread takes the
samples. The server looks at the rounds that come to it, and takes the samples in a tick. A round costs one look into a
dictionary. Only where its layer is due, its rows are copied; in shared memory they are written over two rounds later.
All layers are due at the same moment, once a second, so as a rule one step brings the rows of all. Where the first
layers of a step found no room, a look does not begin with later ones that have room by then: else the first would be
seen far less often. What is kept is bounded: a model with more layers than fit is looked at in turns, and a large layer
at every second channel, or third.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from statsd_bn import limits
from statsd_bn.reduction import FloatArray, is_finite, quietly
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import figures_of

# Sums and squares.
VECTORS = 2

# How often each layer is looked at, if all fit.
SECONDS = 1.0

# What is kept is taken this long after it began, so that it has all layers of a step that is not slow.
SETTLED_SECONDS = 0.25

# What one look may keep: layers, bytes, and bytes of one layer. It takes the trainer's thread at most a millisecond.
MOST_LAYERS, MOST_BYTES, MOST_LAYER_BYTES = limits.MAX_SKEW_LAYERS, 2**22, 2**18

# Names of layers that are remembered; models have hundreds. And what one takes, with a long name: 0.4 kB.
MOST_KNOWN, KNOWN_BYTES = 4096, 512

# Turns are longer than they need to be, so that the last layers of a step never wait for the first ones.
SLACK = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the members have brought to one forward round.

    Attributes:
        counts: values per channel of each member, shape (members,), float64.
        values: sums and squares of each member, shape (members, 2, channels); perhaps not of all channels.
    """

    key: RoundKey
    counts: FloatArray
    values: FloatArray


@dataclass(slots=True)
class _Kept:
    """What is kept since the latest `take`."""

    began: float = math.inf
    samples: list[Sample] = field(default_factory=list)
    size: int = 0

    def has_room(self, key: RoundKey, size: int, most: int) -> bool:
        """Whether rows of so many bytes may be kept too, where all may have `most`."""
        if not self.samples:
            return True
        is_of_step = key.step == self.samples[0].key.step
        return is_of_step and len(self.samples) < MOST_LAYERS and self.size + size <= most


class Samples:
    """Those of one group in one process.

    One thread at a time may `look`, and another one `take`; without a lock, since one assignment passes them on.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._most_of_layer = min(MOST_LAYER_BYTES, most_bytes)
        # When a layer's rows are to be kept again, and after how many looks: in slow steps the first layers would be
        # due before the last ones have had their turn.
        self._due: dict[str, float] = {}
        self._turn: dict[str, int] = {}
        self._taken = 0
        self._kept = _Kept()
        self._take_at = 0.0
        # The first round of its step that found no room.
        self._missed: RoundKey | None = None
        # How many looks it takes to see all layers once.
        self._looks = 0.0

    def look(
        self, now: float, key: RoundKey, counts: Sequence[int], replicas: Sequence[int], values: FloatArray
    ) -> None:
        """Keeps a copy of a round's rows if its layer is due.

        Args:
            now: the time, in seconds.
            key: of the round; only forward ones are looked at.
            counts: of each row.
            replicas: how many rows each member has brought.
            values: shape (rows, vectors, channels); finite. Other rounds than those of layers have no two vectors.
        """
        if self.is_due(now, key) and values.shape[1] == VECTORS:
            self._keep(now, key, counts, replicas, values)

    @property
    def size(self) -> int:
        """How many bytes are kept: rows, and the names of layers, which stay."""
        return self._kept.size + KNOWN_BYTES * len(self._due)

    def is_due(self, now: float, key: RoundKey) -> bool:
        """Whether to look at a round."""
        is_time = now >= self._due.get(key.layer, 0.0) and key.is_forward
        return is_time and self._taken >= self._turn.get(key.layer, 0)

    def stride(self, size: int) -> int:
        """Returns how many channels there are for each one that is kept, of rows of so many bytes."""
        return max(1, math.ceil(size / self._most_of_layer))

    def take(self, now: float) -> list[Sample]:
        """Returns what is kept, all of one step and in the order of the rounds; nothing twice in a second."""
        if now < max(self._take_at, self._kept.began + SETTLED_SECONDS):
            return []
        kept, self._kept = self._kept, _Kept()
        self._take_at = now + SECONDS
        self._taken += bool(kept.samples)
        return kept.samples

    def _keep(
        self, now: float, key: RoundKey, counts: Sequence[int], replicas: Sequence[int], values: FloatArray
    ) -> None:
        stride = self.stride(values.nbytes)
        size = values.nbytes // stride
        self._know(key.layer, size)
        kept = self._kept
        if not kept.has_room(key, size, self._most_bytes):
            self._miss(key)
            return  # it stays due, and comes after the next `take`
        if not kept.samples and self._has_missed_some_before(key):
            return
        seconds = SECONDS
        if self._looks > 1:
            seconds *= self._looks * SLACK
            self._turn[key.layer] = self._taken + math.ceil(self._looks)
        self._due[key.layer] = (now // seconds + 1) * seconds
        kept.began = min(now, kept.began)
        kept.size += size
        kept.samples.append(Sample(key, *_by_member(counts, replicas, values[..., ::stride])))

    def _miss(self, key: RoundKey) -> None:
        if self._missed is None or self._missed.step != key.step:
            self._missed = key

    def _has_missed_some_before(self, key: RoundKey) -> bool:
        """Whether an earlier layer of this step is due, and was not kept."""
        missed = self._missed
        # Where no step is ever counted, the missed layer itself comes again.
        return missed is not None and missed.step == key.step and missed.layer != key.layer

    def _know(self, layer: str, size: int) -> None:
        if layer in self._due:
            return
        if len(self._due) >= MOST_KNOWN:
            self._due.clear()
            self._turn.clear()
            self._looks = 0.0
        self._due[layer] = 0.0
        self._looks += max(1 / MOST_LAYERS, size / self._most_bytes)


@quietly
def _by_member(counts: Sequence[int], replicas: Sequence[int], values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the counts and a copy of the values with one row for each member."""
    if len(replicas) == len(counts):
        return np.array(counts, np.float64), np.array(values)
    firsts = np.concatenate(([0], np.cumsum(replicas)[:-1])).astype(np.intp)
    return np.add.reduceat(np.array(counts, np.float64), firsts), np.add.reduceat(values, firsts, axis=0)


def told_by(samples: Sequence[Sample]) -> tuple[int, dict[str, FloatArray]] | None:
    """Returns the step that samples are of, and the figures of their layers, by name; None without any figures."""
    # Squares may be finite, and their sum not.
    found = {sample.key.layer: figures_of(sample.counts, sample.values) for sample in samples}
    figures = {layer: values for layer, values in found.items() if is_finite(values)}
    return (samples[0].key.step, figures) if figures else None
