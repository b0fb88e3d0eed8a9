"""Few: what can be told of two members, or three, among whom there is no majority to compare with.

Which of two is the odd one nobody can say who sees them for the first time. But each has a past. Where the data of one
change in the middle of a run, as with another normalisation from some step on, its figures leave their past, and those
of the other stay. Where both move alike it is the schedule, or what the network learns, and no finding. A past is made
of looks; the latest of them do not belong to it yet, and are compared with it.

From the first step on only one thing can be told, and only of two: that they differ far more than batches of one source
do (`Apart`). Which one is to blame is not known then.

A group has one such finding. What the network learns moves members with different data in different ways, so what comes
later would follow from the first one, or be none.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from statsd_bn.reduction import FloatArray
from statsd_bn.skew.figures import COUNT, DIRECTIONS, SHIFTS, VARIANCE
from statsd_bn.skew.order import in_order
from statsd_bn.skew.past import LEAST_PAST, RAW, RECENT, Move, Past, features_of

# Groups of so many members have a majority.
MAJORITY = 4

# How far two lie apart that cannot read one source: how many times one's variance is the other's, standard deviations
# between their means, and how many times what one look differs from the next.
APART_LOG, APART_SHIFT, APART_LOOKS = math.log(2.5), 0.5, 4.0

APART_LEAST = np.array([APART_LOG, *[APART_SHIFT] * (1 + DIRECTIONS)])

# The average distance is one over some ten looks.
APART_DECAY = 0.9

# One odd batch says nothing: a layer shows the same so often in a row, and another one at least so often lately.
IN_A_ROW, AGREES = 8, 4

# Of two that have been alike, the one that has changed is told sooner than this, if at all.
LATE_IN_A_ROW = 2 * RECENT

TWO = 2

# Bytes of a layer: the latest looks of three members, and a dozen small arrays.
LAYER_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Changed:
    """A member whose data have changed, while the others' have not.

    Attributes:
        member: its index in the group.
        layer: the earliest layer in a step that shows it.
        layers: how many do.
        since: the step in which that was seen first.
        own: how its figures have moved.
        others: how those of another member have, the one that has moved most.
    """

    member: int
    layer: str
    layers: int
    since: int
    own: Move
    others: Move


@dataclass(frozen=True, slots=True)
class Apart:
    """Two members that do not read data of one source.

    Attributes:
        layer: the earliest layer in a step that shows it.
        layers: how many do.
        since: the step in which that was seen first.
        variance: how many times the second one's variance the first one's is.
        shift: how far their means lie apart, in standard deviations, in the direction in which they do most.
    """

    layer: str
    layers: int
    since: int
    variance: float
    shift: float


class _Run:
    """In how many looks in a row a layer has shown the same, and since when.

    Attributes:
        what: it shows now; None for nothing.
        looks: how many, of which the first was in the step `since`.
    """

    def __init__(self) -> None:
        self.what: int | None = None
        self.looks = self.since = 0

    def add(self, step: int, what: int | None) -> None:
        """Take what one more look shows."""
        if what is None or what != self.what:
            self.what, self.looks, self.since = what, 0, step
        self.looks += what is not None


class _Distance:
    """How far two members lie apart in one layer: averages over the latest looks, and what one look differs."""

    def __init__(self) -> None:
        self.average = self._latest = np.zeros(1)
        self._scatter = np.zeros(1)
        self._looks = 0

    def add(self, figures: FloatArray) -> bool:
        """Take a look; returns whether they lie far apart."""
        features = features_of(figures[:, RAW], figures[:, VARIANCE])
        now = np.append(features[0] - features[1], figures[0, SHIFTS] - figures[1, SHIFTS])
        if self._looks:
            self._scatter = self._scatter + max(1 / self._looks, (1 - APART_DECAY) / 2) * (
                (now - self._latest) ** 2 / 2 - self._scatter
            )
        self._looks += 1
        self.average = self.average + max(1 / self._looks, 1 - APART_DECAY) * (now - self.average)
        self._latest = now
        are_far = abs(self.average) > np.maximum(APART_LEAST, APART_LOOKS * np.sqrt(self._scatter))
        return self._looks >= LEAST_PAST and bool(are_far.any())


class _Layer:
    """What is known of one layer."""

    def __init__(self) -> None:
        self.distance = _Distance()
        self.apart, self.change = _Run(), _Run()
        self.past: Past | None = None
        self.recent: deque[FloatArray] = deque(maxlen=RECENT)
        # Whether the two were alike for long enough to show which one has changed.
        self._were_alike = False

    def add(self, step: int, figures: FloatArray) -> None:
        """Take a look at it."""
        if not figures[:, COUNT].all():
            return  # who has no data has not changed
        if len(self.recent) == RECENT:
            self._learn(self.recent[0])
        self.recent.append(figures[:, RAW])
        past = self.past if self.past and self.past.looks >= LEAST_PAST else None
        self.change.add(step, past.changed(np.array(self.recent)) if past else None)
        if len(figures) == TWO:
            self.apart.add(step, 0 if self.distance.add(figures) else None)
            self._were_alike = past is not None if self.apart.looks <= 1 else self._were_alike

    @property
    def are_apart(self) -> bool:
        """Whether it has shown two to be apart for long enough."""
        return self.apart.looks >= (LATE_IN_A_ROW if self._were_alike else IN_A_ROW)

    def _learn(self, raw: FloatArray) -> None:
        if self.past:
            self.past.add(raw)
        else:
            self.past = Past(raw)


class Few:
    """Two or three members of one group.

    Args:
        most: how many layers are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._layers: dict[str, _Layer] = {}
        self._has_told = False

    @property
    def kept(self) -> int:
        """How many bytes it keeps."""
        return len(self._layers) * LAYER_BYTES

    def more_for(self, layers: Sequence[str]) -> int:
        """Number of bytes more that it would keep after a look at these layers, at most."""
        new = sum(name not in self._layers for name in layers)
        return min(new, self._most - len(self._layers)) * LAYER_BYTES

    def look(self, step: int, layers: Sequence[str], values: FloatArray) -> list[Changed | Apart]:
        """Take the figures of a step; returns what is news.

        Args:
            step: the step.
            layers: the layers' names, in the order of the rounds.
            values: their figures, shape (layers, members, 8).
        """
        if self._has_told:
            return []
        order = in_order(self._layers, layers, self._most)
        self._layers = {name: self._layers.get(name) or _Layer() for name in order}
        for name, figures in zip(layers, values, strict=True):
            if layer := self._layers.get(name):
                layer.add(step, figures)
        are_apart = any(layer.are_apart for layer in self._layers.values())
        have_changed = any(layer.change.looks >= IN_A_ROW for layer in self._layers.values())
        self._has_told = are_apart or have_changed
        return [self._changed()] if have_changed else [self._apart()] if are_apart else []

    def _changed(self) -> Changed:
        showing = {name: layer for name, layer in self._layers.items() if layer.change.looks >= AGREES}
        name, first = next(iter(showing.items()))
        member = first.change.what or 0
        agreeing = [layer for layer in showing.values() if layer.change.what == member]
        assert first.past  # noqa: S101 - it has shown a change
        own, *others = _own_first(first.past.moves(np.array(first.recent)), member)
        most = max(others, key=lambda move: abs(math.log(move.variance)) + move.shift)
        return Changed(member, name, len(agreeing), min(layer.change.since for layer in agreeing), own, most)

    def _apart(self) -> Apart:
        showing = {name: layer for name, layer in self._layers.items() if layer.apart.looks >= AGREES}
        name, first = next(iter(showing.items()))
        log, *shifts = first.distance.average.tolist()
        since = min(layer.apart.since for layer in showing.values())
        return Apart(name, len(showing), since, math.exp(log), max(map(abs, shifts)))


def _own_first(moves: list[Move], member: int) -> list[Move]:
    return [moves[member], *moves[:member], *moves[member + 1 :]]
