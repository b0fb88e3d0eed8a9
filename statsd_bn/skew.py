"""Skew: how far the data of a group's members differ, by the rows that they bring to a forward round. Pure arithmetic.

`figures_of` describes one round, and `Comparison` says what follows from many. `statsd_bn.skew_samples` decides which
rounds are looked at. The server compares the members that it knows; members compare themselves if there is no server.

Of N values in a channel, with mean μ and variance σ², member r has n_r with the mean μ_r. The share of the variance
that lies between the members is

    η² = Σ_r n_r (μ_r - μ)² / (N σ²),    0 <= η² <= 1,

and a member's part of it is its own term. Here both are the mean over the channels that vary. So a channel counts as
much as another, whatever its scale, and the parts add up to η². Neighbouring pixels are much alike, so η² is larger
than it would be for independent values, and is good for comparisons only.

The rule: a member stands out in a layer if its variance is far from the others', or its part of η² far above theirs, in
the median of the latest looks. It is reported once, with the earliest layer. What is usual comes from the others and
not from the past, since a member may differ from the first step on. So there is no rule for two members.

Copies are found among two as well: members whose data are the same, to the last bit, look after look. Members with
different samples do not have the same means and variances in every layer. Members that have read the same shard, or
draw it with the same seed, do, as long as nothing in the model is random.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import numpy as np

from statsd_bn import limits
from statsd_bn.checks import check_integer
from statsd_bn.errors import ProtocolError
from statsd_bn.reduction import FloatArray

# Which number is what, and how many there are.
COUNT, MEAN, VARIANCE, PART = range(4)
FIGURES = 4

# A channel whose variance is less than this share of its mean square is rounding noise, or constant.
LEAST_VARIANCE = 1e-12

# Looks at a group that come sooner than this after another one are dropped.
LEAST_SECONDS = 0.5

# One odd batch says nothing: a member stands out in the median of so many looks at a layer.
LOOKS = 16

# How many times the variance of the others is another one, besides four times what these differ.
OTHER_VARIANCE, SPREADS = 2.5, 4.0

# How much more of the variance between members one brings than the others do. Where two members are alike and the third
# is not, it brings 4 times as much however different it is, since the mean moves towards it; so the limit is less.
LEAST_RATIO, LEAST_PART = 3.0, 0.02

# Nobody can be named among fewer.
LEAST_MEMBERS = 3

# One batch may come twice: copies are the same in so many looks in a row.
COPIES_IN_A_ROW = 8

# What a look weighs in the averages beside the next one: they cover some ten looks.
DECAY = 0.9

# Layers that are kept for a group at most, and layers times members: 16 MB altogether. What one layer takes for each
# member, and beside that, with a long name.
MOST_LAYERS, MOST_NUMBERS = 1024, 2**16
NUMBERS_BYTES, LAYER_BYTES = 8 * FIGURES + 2 * 4 * LOOKS, 5632

TINY = 1e-300

_FLOAT64 = np.dtype(np.float64)

# Layers, members, figures.
DIMENSIONS = 3


def figures_of(counts: FloatArray, values: FloatArray) -> FloatArray:
    """Returns the figures of the members in one round.

    Args:
        counts: values per channel of each member, shape (members,); 0 for a member without data.
        values: sums and squares, shape (members, 2, channels); finite.

    Returns:
        Shape (members, 4): the count; the mean of the channels' means; the mean of their variances; the member's part
        of η². All 0 for a member without data.
    """
    sums, squares = values[:, 0], values[:, 1]
    weights = counts[:, np.newaxis]
    total = counts.sum()
    found = np.zeros((len(counts), FIGURES))
    if not total:
        return found
    with np.errstate(all="ignore"):
        means = np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)
        power = np.divide(squares, weights, out=np.zeros_like(squares), where=weights > 0)
        mean, all_power = sums.sum(axis=0) / total, squares.sum(axis=0) / total
        variance = all_power - mean * mean
        varies = variance > LEAST_VARIANCE * all_power
        terms = weights * (means - mean) ** 2
        parts = np.divide(terms, total * variance, out=np.zeros_like(terms), where=varies)
        found[:, COUNT] = counts
        found[:, MEAN] = means.mean(axis=1)
        found[:, VARIANCE] = np.maximum(power - means * means, 0.0).mean(axis=1)
        found[:, PART] = np.minimum(parts, 1.0).sum(axis=1) / max(1, int(np.count_nonzero(varies)))
    return found


def check_figures(values: object, layers: int) -> None:
    """Raises ProtocolError unless `values` are figures of so many layers, shape (layers, members, 4)."""
    if not (isinstance(values, np.ndarray) and values.dtype == _FLOAT64 and values.ndim == DIMENSIONS):
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ProtocolError(f"figures: expected float64 of {DIMENSIONS} dimensions, got {found}")
    if values.shape[::2] != (layers, FIGURES):
        raise ProtocolError(f"figures: expected shape ({layers}, members, {FIGURES}), got {values.shape}")
    check_integer("members", values.shape[1], min(1, layers), limits.MAX_MEMBERS)
    if not layers:
        return
    are_within = values[..., COUNT].max() <= limits.MAX_COUNT and values[..., PART].max() <= 1
    if not (np.isfinite(values).all() and values[..., [COUNT, VARIANCE, PART]].min() >= 0 and are_within):
        raise ProtocolError(
            f"figures: expected finite numbers; counts of 0 to {limits.MAX_COUNT}, variances from 0, parts from 0 to 1"
        )


@dataclass(frozen=True, slots=True)
class Different:
    """A member whose data differ from the others'.

    Attributes:
        layer: the earliest layer in a step that shows it.
        layers: how many do.
        since: the step in which that was seen first.
        eta2: the share of that layer's variance that lies between the members.
        part: the member's part of it.
        usual: the median of the others' parts.
        variance: the member's variance divided by the median of the others'.
    """

    member: int
    layer: str
    layers: int
    since: int
    eta2: float
    part: float
    usual: float
    variance: float

    def in_words(self, names: Sequence[str]) -> str:
        """What was found, in one line; `names` are the members'."""
        times = f"{self.variance:.3g}x"
        is_variance = not 1 / OTHER_VARIANCE < self.variance < OTHER_VARIANCE
        what = f"variance {times} the others'" if is_variance else "mean unlike the others'"
        numbers = f"eta squared {self.eta2:.2g}, of which this rank {self.part:.2g} and others {self.usual:.2g}"
        if not is_variance:
            numbers += f"; variance {times}"
        if self.layers > 1:
            numbers += f"; earliest of {self.layers} layers"
        return f"{names[self.member]}: input {what} in layer {self.layer!r} since step {self.since} ({numbers})"


@dataclass(frozen=True, slots=True)
class Same:
    """A member whose data are those of another one.

    Attributes:
        other: the first member that has the same data.
        layer: the earliest one in a step, of those that were looked at.
        since: the step in which that was seen first.
    """

    member: int
    other: int
    layer: str
    since: int

    def in_words(self, names: Sequence[str]) -> str:
        """What was found, in one line; `names` are the members'."""
        member, other = names[self.member], names[self.other]
        return (
            f"{member}: input the same as that of {other} in every layer since step {self.since} (one shard for both?)"
        )


class Comparison:
    """What the members' data of one group show beside each other."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._most_layers = max(1, min(MOST_LAYERS, MOST_NUMBERS // members))
        self._layer_bytes = LAYER_BYTES + NUMBERS_BYTES * members
        self._layers: dict[str, _Layer] = {}
        self._differing: set[int] = set()
        # Of each pair of copies: since which step, and for how many looks.
        self._pairs: dict[tuple[int, int], tuple[int, int]] = {}
        self._copies: set[tuple[int, int]] = set()
        self._latest = -math.inf

    def look(self, now: float, step: int, layers: Sequence[str], values: FloatArray) -> list[Different | Same]:
        """Take the figures of a step; returns what they show, as far as that is news.

        Args:
            now: the time, in seconds.
            step: the step.
            layers: the layers' names, in the order of the rounds.
            values: their figures, shape (layers, members, 4).
        """
        if now - self._latest < LEAST_SECONDS:
            return []
        self._latest = now
        order = in_order(self._layers, layers, self._most_layers)
        self._layers = {name: self._layers.get(name) or _Layer(self._members) for name in order}
        kept = [(self._layers[name], one) for name, one in zip(layers, values, strict=True) if name in self._layers]
        for layer, figures in kept:
            layer.add(step, figures)
        return [*self._new_differing(layer for layer, _ in kept), *self._new_copies(step, layers[0], values)]

    def averages(self, first: int, most_bytes: int) -> tuple[int, list[str], FloatArray]:
        """Average figures of the layers, in the order of a step.

        Args:
            first: how many layers to pass over.
            most_bytes: of names and figures; a name takes one more for the end of its line.

        Returns:
            How many layers there are; the names of those that fit; their figures, shape (layers, members, 4).
        """
        known = [(name, layer.average) for name, layer in self._layers.items() if layer.weight]
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
        return min(new, self._most_layers - len(self._layers)) * self._layer_bytes

    def _new_differing(self, layers: Iterable["_Layer"]) -> Iterable[Different]:
        odd = {layer.odd_one(LOOKS) for layer in layers}
        news = sorted(member for member in odd - self._differing if member is not None)
        self._differing.update(news)
        return [self._different(member) for member in news]

    def _different(self, member: int) -> Different:
        # A layer may have been looked at less often than another one.
        looks = (LOOKS, LOOKS // 2)
        showing = {name: layer for name, layer in self._layers.items() if member in map(layer.odd_one, looks)}
        name, first = next(iter(showing.items()))
        own, others = first.average[member], np.median(np.delete(first.average, member, axis=0), axis=0)
        return Different(
            member,
            name,
            len(showing),
            min(layer.since(member) for layer in showing.values()),
            eta2=float(first.average[:, PART].sum()),
            part=float(own[PART]),
            usual=float(others[PART]),
            variance=float(own[VARIANCE]) / max(float(others[VARIANCE]), TINY),
        )

    def _new_copies(self, step: int, layer: str, values: FloatArray) -> Iterable[Same]:
        before = self._pairs
        self._pairs = {}
        for pair in _same_pairs(values):
            since, looks = before.get(pair, (step, 0))
            self._pairs[pair] = since, looks + 1
        enough = {pair: since for pair, (since, looks) in self._pairs.items() if looks == COPIES_IN_A_ROW}
        news = [Same(*pair, layer, since) for pair, since in enough.items() if pair not in self._copies]
        self._copies.update(enough)
        return news


class _Layer:
    """What is known of a layer.

    Attributes:
        average: of each member's figures, weighed by counts and by age, shape (members, 4).
        weight: of all looks, the older ones counting less.
    """

    def __init__(self, members: int) -> None:
        self.average = np.zeros((members, FIGURES))
        self.weight = 0.0
        # Steps of the latest looks, and what is judged of them.
        self._recent: deque[tuple[int, FloatArray]] = deque(maxlen=LOOKS)

    def add(self, step: int, figures: FloatArray) -> None:
        """Take a look at it."""
        weight = float(figures[:, COUNT].sum())
        if not weight:
            return
        self.weight = DECAY * self.weight + weight
        new = weight / self.weight
        # So that nothing overflows, whatever a member says.
        self.average = (1 - new) * self.average + new * figures
        if np.count_nonzero(figures[:, COUNT]) >= LEAST_MEMBERS:
            self._recent.append((step, _judged(figures).astype(np.float32)))

    def odd_one(self, looks: int) -> int | None:
        """Index of the member that stands out in the median of so many of the latest looks; None for nobody."""
        if len(self._recent) < looks:
            return None
        latest = [judged for _, judged in self._recent][-looks:]
        return odd_one(np.median(latest, axis=0))

    def since(self, member: int) -> int:
        """First step of the latest looks in a row in which a member stood out."""
        in_a_row = takewhile(lambda look: odd_one(look[1]) == member, reversed(self._recent))
        return min((step for step, _ in in_a_row), default=self._recent[-1][0])


def _judged(figures: FloatArray) -> FloatArray:
    """Each member's part, and the logarithm of its variance beside the others', shape (members, 2)."""
    judged = np.column_stack((figures[:, PART], np.log(np.maximum(figures[:, VARIANCE], TINY))))
    has_data = figures[:, COUNT] > 0
    # Members without data are like the others.
    usual = np.median(judged[has_data], axis=0)
    judged[~has_data] = usual
    judged[:, 1] -= usual[1]
    return judged


def odd_one(judged: FloatArray) -> int | None:
    """Index of the member that stands out among three or more, by its part and the logarithm of its variance."""
    parts, logs = judged.T
    at, distance, spread = _farthest(logs)
    if distance > math.log(OTHER_VARIANCE) + SPREADS * spread:
        return at
    at = int(parts.argmax())
    return at if parts[at] > max(LEAST_PART, LEAST_RATIO * float(np.median(np.delete(parts, at)))) else None


def _farthest(values: FloatArray) -> tuple[int, float, float]:
    """Index of the value farthest from the middle; its distance from the others' median; how far these lie from it."""
    at = int(abs(values - np.median(values)).argmax())
    others = np.delete(values, at)
    middle = np.median(others)
    return at, float(abs(values[at] - middle)), float(np.median(abs(others - middle)))


def _same_pairs(values: FloatArray) -> Iterable[tuple[int, int]]:
    """Each member that has the figures of an earlier one in all layers, with that one."""
    firsts: dict[bytes, int] = {}
    for member, figures in enumerate(values.swapaxes(0, 1)):
        # Constant input, or none, is the same for good reason.
        if not np.all(figures[:, COUNT]) or not np.any(figures[:, VARIANCE]):
            continue
        other = firsts.setdefault(figures[:, [COUNT, MEAN, VARIANCE]].tobytes(), member)
        if other != member:
            yield member, other


def in_order(known: Mapping[str, object], names: Sequence[str], most: int) -> list[str]:
    """Names of all layers in the order of a step; new ones come before the one that comes next in this look."""
    order = list(known)
    if all(name in known for name in names):
        return order
    next_one = len(order)
    for name in reversed(names):
        if name in order:
            next_one = order.index(name)
        elif len(order) < most:
            order.insert(next_one, name)
    return order
