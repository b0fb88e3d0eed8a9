"""Skew: whose data differ from those of the other members, layer by layer.

Each layer has a decaying average of the members' figures, see `statsd_bn.skew`. A member stands out where it brings
much more of the variance between the members than the others do, where its own variance is another, or where its means
lie to one side, see `statsd_bn.skew.shift`. What is usual is said by the others, not by the past: a member may have
been different from the first step on. With two members nobody can tell so which of them is the odd one, see
`statsd_bn.skew.few`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from statsd_bn.reduction import FloatArray
from statsd_bn.skew import COUNT, FIGURES, PART, SHIFTS, VARIANCE, shift
from statsd_bn.skew.order import in_order
from statsd_bn.skew.shift import Shift

# What a look weighs beside the next one: an average over some ten looks.
DECAY = 0.9

# One odd batch says nothing: a layer has been looked at so often, and shows the same member so often in a row.
LEAST_LOOKS, IN_A_ROW = 10, 8

# How much more of the variance between members one brings than the others do. Where two members are alike and the third
# is not, it brings 4 times as much however different it is, since the mean moves towards it; so the limit is less.
LEAST_RATIO, LEAST_PART = 3.0, 0.02

# How many times the variance of the others is another one, besides four times what these differ.
OTHER_VARIANCE, SPREADS = 2.5, 4.0

# What one look may count for at most: so many times the usual part, and a tenth or ten times the variance.
MOST_RATIO, MOST_LOGS = 6.0, (-math.log(10.0), math.log(10.0))

# Nobody can be named among fewer.
LEAST_MEMBERS = 3

# Layers that are kept for a group at most, and layers times members: 9 MB altogether. What one layer takes for each
# member, and beside that, with a long name.
MOST_LAYERS, MOST_NUMBERS = 1024, 2**16
NUMBERS_BYTES, LAYER_BYTES = 8 * (FIGURES + 2 + shift.NUMBERS), 1536


@dataclass(slots=True)
class Layer:
    """What is known of a layer.

    Attributes:
        average: of each member's figures, weighed by counts and by age, shape (members, 4).
        judged: such an average of each member's part, and of the logarithm of its variance beside the others'. What one
            look adds is limited, so that one odd batch is soon forgotten; shape (members, 2).
        shift: how far each member's means lie to one side.
        weight: of all looks, the older ones counting less.
        looks: how many there were.
        who: the member that stands out, by its index; None if nobody does.
        in_a_row: in how many looks it has done so now.
        since: the step of the first one of these.
    """

    average: FloatArray
    judged: FloatArray
    shift: Shift
    weight: float = 0.0
    looks: int = 0
    who: int | None = None
    in_a_row: int = 0
    since: int = 0

    @property
    def shows(self) -> int | None:
        """The member that it shows to be different."""
        return self.who if self.looks >= LEAST_LOOKS and self.in_a_row >= IN_A_ROW else None

    def agrees(self, member: int) -> bool:
        """Whether it has stood for the same lately; it may have been looked at less often than another layer."""
        return self.who == member and self.in_a_row >= IN_A_ROW // 2

    def add(self, step: int, figures: FloatArray) -> None:
        """Take a look at it."""
        weight = float(figures[:, COUNT].sum())
        if not weight:
            return
        judged = self._within_limits(figures)
        self.weight = DECAY * self.weight + weight
        new = weight / self.weight
        # So that nothing overflows, whatever a member says.
        self.judged = (1 - new) * self.judged + new * judged
        self.average = (1 - new) * self.average + new * figures[:, :FIGURES]
        self.shift.add(_shifts(figures))
        self.looks += 1
        who = self._outlier()
        if who is None or who != self.who:
            self.who, self.in_a_row, self.since = who, 0, step
        self.in_a_row += who is not None

    def _outlier(self) -> int | None:
        """Index of the member that stands out now, if one does."""
        if len(self.judged) < LEAST_MEMBERS:
            return None
        parts, logs = self.judged.T
        who = with_a_greater_part(parts)
        if who is not None and self.average[who, PART] > LEAST_PART:
            return who
        odd = with_another_variance(logs)
        return self.shift.outlier() if odd is None else odd

    def _within_limits(self, figures: FloatArray) -> FloatArray:
        parts = figures[:, PART]
        # Its own median says nothing of the look of an odd batch, whose mean moves away from all the others.
        usual = float(np.median(self.average[:, PART])) if self.looks else float(np.median(parts))
        most = max(float(parts.max()), 1e-300)
        logs = np.log(np.maximum(figures[:, VARIANCE], 1e-300))
        return np.column_stack((parts * min(1.0, MOST_RATIO * usual / most), (logs - np.median(logs)).clip(*MOST_LOGS)))


@dataclass(frozen=True, slots=True)
class Different:
    """A member that is different.

    Attributes:
        member: its index in the group.
        layer: the earliest layer in a step that shows it.
        layers: how many do.
        since: the step in which that was seen first.
        eta2: the share of that layer's variance that lies between the members.
        part: the member's part of it.
        usual: what the other members' parts are as a rule.
        variance: how many times theirs its own variance is.
        shift: how far its means lie to one side of theirs, in standard deviations.
    """

    member: int
    layer: str
    layers: int
    since: int
    eta2: float
    part: float
    usual: float
    variance: float
    shift: float


class Skew:
    """That of one group.

    Args:
        members: how many the group has.

    Attributes:
        most: how many layers it keeps at most.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self.most = max(1, min(MOST_LAYERS, MOST_NUMBERS // members))
        self._layer_bytes = LAYER_BYTES + NUMBERS_BYTES * members
        self._layers: dict[str, Layer] = {}
        self._told: set[int] = set()

    def look(self, step: int, layers: Sequence[str], values: FloatArray) -> list[Different]:
        """Take the figures of a step.

        Args:
            step: the step.
            layers: the layers' names, in the order of the rounds.
            values: their figures, shape (layers, members, 8).

        Returns:
            Members that are different, as far as that is news.
        """
        self._learn(layers)
        for name, figures in zip(layers, values, strict=True):
            if layer := self._layers.get(name):
                layer.add(step, figures)
        found = {layer.shows for layer in self._layers.values()} - self._told - {None}
        news = [self._different(member) for member in sorted(one for one in found if one is not None)]
        self._told.update(one.member for one in news)
        return news

    def told(self, first: int, most_bytes: int) -> tuple[int, list[str], FloatArray]:
        """What is known of the layers, in the order of a step.

        Args:
            first: how many layers to pass over.
            most_bytes: of names and figures; a name takes one more for the end of its line.

        Returns:
            How many layers there are; the names of those that fit; their average figures, shape (layers, members, 4).
        """
        known = [(name, layer.average) for name, layer in self._layers.items() if layer.looks]
        sizes = accumulate(len(name.encode()) + 1 + average.nbytes for name, average in known[first:])
        fitting = known[first : first + sum(size <= most_bytes for size in sizes)]
        values = np.array([average for _, average in fitting]).reshape(-1, self._members, FIGURES)
        return len(known), [name for name, _ in fitting], values

    @property
    def kept(self) -> int:
        """How many bytes it keeps."""
        return len(self._layers) * self._layer_bytes

    def more_for(self, layers: Sequence[str]) -> int:
        """Number of bytes more that it would keep after a look at these layers, at most."""
        new = sum(name not in self._layers for name in layers)
        return min(new, self.most - len(self._layers)) * self._layer_bytes

    def _learn(self, names: Sequence[str]) -> None:
        """Keep layers that are new, each in its place in a step."""
        order = in_order(self._layers, names, self.most)
        if len(order) == len(self._layers):
            return
        self._layers = {
            name: self._layers.get(name)
            or Layer(np.zeros((self._members, FIGURES)), np.zeros((self._members, 2)), Shift(self._members))
            for name in order
        }

    def _different(self, member: int) -> Different:
        showing = {name: layer for name, layer in self._layers.items() if layer.agrees(member)}
        first = next(iter(showing))
        average = showing[first].average
        others = np.median(np.delete(average, member, axis=0), axis=0)
        own = average[member]
        times = float(own[VARIANCE]) / max(float(others[VARIANCE]), 1e-300)
        since = min(layer.since for layer in showing.values())
        shifted = showing[first].shift.of(member)
        told = (float(average[:, PART].sum()), float(own[PART]), float(others[PART]), times, shifted)
        return Different(member, first, len(showing), since, *told)


def _shifts(figures: FloatArray) -> FloatArray:
    """Returns the members' shifts, shape (directions, members); who has no data is where the others are."""
    has_data = figures[:, COUNT] > 0
    shifts = figures[:, SHIFTS].T
    return np.where(has_data, shifts, np.median(shifts[:, has_data], axis=1, keepdims=True))


def with_a_greater_part(parts: FloatArray) -> int | None:
    """Returns the index of the member whose part is far greater than the others', if one is."""
    top = int(parts.argmax())
    return top if parts[top] > LEAST_RATIO * np.median(np.delete(parts, top)) else None


def with_another_variance(logs: FloatArray) -> int | None:
    """Returns the index of the member whose variance is another than the others', if one is, by the logarithms."""
    odd = int(abs(logs - np.median(logs)).argmax())
    others = np.delete(logs, odd)
    middle = np.median(others)
    spread = np.median(abs(others - middle))
    return odd if abs(logs[odd] - middle) > math.log(OTHER_VARIANCE) + SPREADS * spread else None
