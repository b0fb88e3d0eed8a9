"""Skew: how far the data of a group's members differ, computed from their rows in forward rounds. Pure arithmetic.

Of N values in a channel, with mean μ and variance σ², member r has n_r values with mean μ_r. The share of the variance
that lies between the members is

    η² = Σ_r n_r (μ_r - μ)² / (N σ²),    0 <= η² <= 1,

and a member's part of η² is its own term; both are averaged over the channels that vary. Neighbouring pixels correlate,
so η² is larger than for independent values, and only useful in comparisons.

A member is an outlier in a layer if its variance is far from the others', or its part of η² far above theirs, in the
median of the latest samples. The reference is the other members, not the past, since a member may differ from the first
step on. Duplicates are members with bitwise equal figures in sample after sample: they read the same shard, or draw
with the same seed.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from statsd_bn import limits
from statsd_bn.checks import check_array, check_integer
from statsd_bn.errors import ProtocolError
from statsd_bn.reduction import FloatArray
from statsd_bn.text import percent, two_digits

# The index of each figure, and their number.
COUNT, MEAN, VARIANCE, PART = range(4)
FIGURES = 4

MIN_VARIANCE_RATIO = 1e-12  # a channel with a smaller ratio of variance to mean square is constant but for rounding
MIN_SECONDS = 0.5  # between two samples of a group; a sample that comes sooner is dropped
WINDOW = 16  # the rule uses the median of this many latest samples of a layer: one odd batch means nothing

# A member is an outlier if the logarithm of its variance is farther from the others' median than log(VARIANCE_FACTOR)
# plus SPREADS times their median deviation ...
VARIANCE_FACTOR, SPREADS = 2.5, 4.0

# ... or if its part of η² is above MIN_PART and above PART_FACTOR times the others' median. If one of three members of
# equal size differs, its part is always 4 times the others', since μ moves with it; so the factor is below 4.
PART_FACTOR, MIN_PART = 3.0, 0.02

MIN_MEMBERS = 3  # no outlier can be named among fewer
DUPLICATES_IN_A_ROW = 8  # duplicates are equal in this many samples in a row; one equal batch means nothing
MAX_ABSENCE = 2 * WINDOW  # a finding is over after this many samples in a row without its outlier or duplicate
DECAY = 0.9  # weight of a sample relative to the next one; averages cover about ten samples

# Limits of a group: layers, and layers times members. A group needs 31 MB at most.
MAX_LAYERS, MAX_LAYER_MEMBERS = 1024, 2**18

# Bytes of a layer: for each member, and for the rest, which includes a long name.
MEMBER_BYTES, LAYER_BYTES = 8 * FIGURES + 2 * 2 * WINDOW, 5632

TINY = 1e-300

# An outlier is described by its ratio of variances if that, or its inverse, is at least NOTABLE_RATIO; else by the
# distance of its mean if that is at least NOTABLE_SHIFT standard deviations; else by its part of η².
NOTABLE_RATIO, NOTABLE_SHIFT = 2.0, 0.2

MAX_RATIO = 1e6  # reported ratios are finite, whatever the data


def compute_figures(counts: FloatArray, values: FloatArray) -> FloatArray:
    """Returns the figures of the members in one round, shape (members, 4); all 0 for a member without data."""
    # `counts` are values per channel, shape (members,), and `values` finite sums and squares, (members, 2, channels).
    sums, squares = values[:, 0], values[:, 1]
    weights = counts[:, np.newaxis]
    total = counts.sum()
    figures = np.zeros((len(counts), FIGURES))
    if not total:
        return figures
    with np.errstate(all="ignore"):
        means = np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)
        power = np.divide(squares, weights, out=np.zeros_like(squares), where=weights > 0)
        mean, all_power = sums.sum(axis=0) / total, squares.sum(axis=0) / total
        variance = all_power - mean * mean
        varies = variance > MIN_VARIANCE_RATIO * all_power
        terms = weights * (means - mean) ** 2
        parts = np.divide(terms, total * variance, out=np.zeros_like(terms), where=varies)
        figures[:, COUNT] = counts
        figures[:, MEAN] = means.mean(axis=1)
        figures[:, VARIANCE] = np.maximum(power - means * means, 0.0).mean(axis=1)
        figures[:, PART] = np.minimum(parts, 1.0).sum(axis=1) / max(1, int(np.count_nonzero(varies)))
    return figures


def check_figures(values: Any, layers: int) -> None:
    """Raises ProtocolError unless `values` are figures of `layers` layers, shape (layers, members, 4)."""
    check_array("figures", values, 3)
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
class Finding:
    """An outlier, which has other data than the rest, or a duplicate, which has the same data as another member."""

    member: int
    layer: str  # the first, in the order of a step, that shows the outlier; for a duplicate the first sampled one
    numbers: dict[str, Any]  # for the report, finite: the other arguments of `describe_outlier`, or `since` and `other`

    @property
    def other(self) -> int | None:
        """The first member with the same data; None for an outlier."""
        return self.numbers.get("other")

    def describe(self, names: Sequence[str]) -> str:
        """Returns the finding in one line; `names` are the members' names."""
        member = names[self.member]
        if self.other is None:
            return f"{member}: {describe_outlier(self.layer, **self.numbers)}"
        other, since = names[self.other], self.numbers["since"]
        return f"{member}: same data as {other} in all layers since step {since}; do both read the same shard?"


def describe_outlier(
    layer: str, *, since: float, layers: float, variance: float, shift: float, part: float, usual: float
) -> str:
    """Returns the strongest sign of an outlier as a clause."""
    # `since`: first step of the latest run of samples with this outlier; `layers`: number of layers that show it.
    # `variance`: ratio to the others' median variance; `shift`: distance from their median mean in standard deviations.
    # `part`: the member's part of η²; `usual`: the others' median part.
    if not 1 / NOTABLE_RATIO < variance < NOTABLE_RATIO:
        ratio = f"{two_digits(variance)} times" if variance > 1 else percent(variance)
        what = f"its activations vary {ratio} as much as the others'"
    elif abs(shift) >= NOTABLE_SHIFT:
        what = f"its mean is {two_digits(abs(shift))} standard deviations off the others'"
    else:
        what = f"{percent(part)} of the variance comes from it, and {percent(usual)} from another rank,"
    later = f", and differ in {layers - 1} later layer{'s' * (layers > 2)}" if layers > 1 else ""  # noqa: PLR2004
    return f"since step {since} {what} in {layer}{later}"


class SkewDetector:
    """Compares the data of a group's members, sample by sample."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._max_layers = max(1, min(MAX_LAYERS, MAX_LAYER_MEMBERS // members))
        self._layer_bytes = LAYER_BYTES + MEMBER_BYTES * members
        self._layers: dict[str, _Layer] = {}
        # Per pair of members with equal data: the first step, and the number of samples since that step.
        self._pairs: dict[tuple[int, int], tuple[int, int]] = {}
        # Samples since a reported outlier or pair was last seen, by member and other member.
        self._absence: dict[tuple[int, int | None], int] = {}
        self._latest = -math.inf

    def add(self, now: float, step: int, layers: Sequence[str], values: FloatArray) -> list[Finding]:
        """Adds a sample, of shape (layers, members, 4); returns the findings that were not reported before."""
        if now - self._latest < MIN_SECONDS:
            return []
        self._latest = now
        order = merge_order(self._layers, layers, self._max_layers)
        self._layers = {name: self._layers.get(name) or _Layer(self._members) for name in order}
        added = [(self._layers[name], one) for name, one in zip(layers, values, strict=True) if name in self._layers]
        for layer, figures in added:
            layer.add(step, figures)
        outliers = {member for layer, _ in added if (member := layer.outliers[0]) is not None}
        before, self._pairs = self._pairs, {}
        for pair in _equal_pairs(values):
            since, samples = before.get(pair, (step, 0))
            self._pairs[pair] = since, samples + 1
        present = {*((member, None) for member in outliers), *self._pairs}
        self._absence = {one: 0 if one in present else absence + 1 for one, absence in self._absence.items()}
        found = [self._outlier(member) for member in sorted(outliers) if (member, None) not in self._absence]
        for (member, other), (since, samples) in self._pairs.items():
            if samples == DUPLICATES_IN_A_ROW and (member, other) not in self._absence:
                found.append(Finding(member, layers[0], {"since": since, "other": other}))
        self._absence |= {(one.member, one.other): 0 for one in found}
        return found

    def is_current(self, found: Finding) -> bool:
        """Whether the latest samples still show a finding."""
        return self._absence[found.member, found.other] < MAX_ABSENCE

    @property
    def nr_layers(self) -> int:
        """Number of layers with samples."""
        return sum(layer.weight > 0 for layer in self._layers.values())

    def averages(self, first: int, max_bytes: int) -> tuple[int, list[str], FloatArray]:
        """Returns the number of layers with samples, and names and average figures of layers from index `first` on."""
        # Figures have shape (layers, members, 4). Names, each with a newline, and figures fit into `max_bytes`.
        known = [(name, layer.average) for name, layer in self._layers.items() if layer.weight]
        sizes = accumulate(len(name.encode()) + 1 + average.nbytes for name, average in known[first:])
        fitting = known[first : first + sum(size <= max_bytes for size in sizes)]
        values = np.array([average for _, average in fitting]).reshape(-1, self._members, FIGURES)
        return len(known), [name for name, _ in fitting], values

    @property
    def size(self) -> int:
        """Memory in use, in bytes."""
        return len(self._layers) * self._layer_bytes

    def growth(self, layers: Sequence[str]) -> int:
        """Returns the bytes that a sample of these layers adds to `size` at most."""
        new = sum(name not in self._layers for name in layers)
        return min(new, self._max_layers - len(self._layers)) * self._layer_bytes

    def _outlier(self, member: int) -> Finding:
        showing = {name: layer for name, layer in self._layers.items() if member in layer.outliers}
        name, first = next(iter(showing.items()))
        own, others = first.average[member], np.median(np.delete(first.average, member, axis=0), axis=0)
        variance = float(own[VARIANCE]) / max(float(others[VARIANCE]), TINY)
        shift = float(own[MEAN] - others[MEAN]) / max(math.sqrt(float(others[VARIANCE])), TINY)
        numbers = {
            "since": min(layer.since(member) for layer in showing.values()),
            "layers": len(showing),
            "variance": min(variance, MAX_RATIO),
            "shift": max(-MAX_RATIO, min(shift, MAX_RATIO)),
            "part": float(own[PART]),
            "usual": float(others[PART]),
        }
        return Finding(member, name, numbers)


class _Layer:
    """The samples of one layer."""

    def __init__(self, members: int) -> None:
        self.average = np.zeros((members, FIGURES))  # weighted by counts and by age
        self.weight = 0.0
        # Steps of the latest samples, and the members' deviations, the last samples at the end. The rules' thresholds
        # are far coarser than the three digits of float16.
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self._recent = np.zeros((WINDOW, members, 2), np.float16)
        # Outliers in the medians of the latest WINDOW and WINDOW // 2 samples, and in each of these samples. They are
        # computed with each sample: a finding looks at all layers, and must not delay the server.
        self.outliers: tuple[int | None, int | None] = None, None
        self._sample_outliers: deque[int | None] = deque(maxlen=WINDOW)

    def add(self, step: int, figures: FloatArray) -> None:
        weight = float(figures[:, COUNT].sum())
        if not weight:
            return
        self.weight = DECAY * self.weight + weight
        new = weight / self.weight
        self.average *= 1 - new  # in this form no finite figures overflow
        self.average += new * figures
        if np.count_nonzero(figures[:, COUNT]) >= MIN_MEMBERS:
            self._steps.append(step)
            self._recent[:-1] = self._recent[1:]
            self._recent[-1] = _deviations(figures)
            # The shorter window serves layers with fewer samples than WINDOW.
            self.outliers = self._outlier(WINDOW), self._outlier(WINDOW // 2)
            self._sample_outliers.append(find_outlier(self._recent[-1].astype(np.float32)))

    def _outlier(self, window: int) -> int | None:
        if len(self._steps) < window:
            return None
        latest = self._recent[-window:].astype(np.float32)
        latest.sort(axis=0)  # takes half as long as `np.median`
        return find_outlier((latest[window // 2 - 1] + latest[window // 2]) / 2)

    def since(self, member: int) -> int:
        """Returns the first step of the latest unbroken run of samples in which a member is an outlier."""
        latest = zip(reversed(self._steps), reversed(self._sample_outliers), strict=True)
        run = takewhile(lambda sample: sample[1] == member, latest)
        return min((step for step, _ in run), default=self._steps[-1])


def _deviations(figures: FloatArray) -> FloatArray:
    """Returns each member's part, and the logarithm of its variance ratio to the median, shape (members, 2)."""
    deviations = np.column_stack((figures[:, PART], np.log(np.maximum(figures[:, VARIANCE], TINY))))
    has_data = figures[:, COUNT] > 0
    usual = np.median(deviations[has_data], axis=0)
    deviations[~has_data] = usual  # never outliers
    deviations[:, 1] -= usual[1]
    return deviations


def find_outlier(deviations: FloatArray) -> int | None:
    """Returns the outlier among three or more members, by parts and logarithms of variance ratios."""
    parts, logs = deviations.T
    # Medians take most of the time, so they are computed only where there may be an outlier.
    if float(logs.max() - logs.min()) > math.log(VARIANCE_FACTOR):
        at = int(abs(logs - np.median(logs)).argmax())
        others = np.delete(logs, at)
        middle = np.median(others)
        spread = float(np.median(abs(others - middle)))
        if float(abs(logs[at] - middle)) > math.log(VARIANCE_FACTOR) + SPREADS * spread:
            return at
    at = int(parts.argmax())
    is_above = parts[at] > MIN_PART and parts[at] > PART_FACTOR * float(np.median(np.delete(parts, at)))
    return at if is_above else None


def _equal_pairs(values: FloatArray) -> Iterable[tuple[int, int]]:
    """Yields pairs of members with equal figures in all layers; the second is the earlier member."""
    firsts: dict[bytes, int] = {}
    for member, figures in enumerate(values.swapaxes(0, 1)):
        # Members without data or with constant input are no duplicates.
        if not np.all(figures[:, COUNT]) or not np.any(figures[:, VARIANCE]):
            continue
        other = firsts.setdefault(figures[:, [COUNT, MEAN, VARIANCE]].tobytes(), member)
        if other != member:
            yield member, other


def merge_order(known: Mapping[str, object], names: Sequence[str], most: int) -> list[str]:
    """Returns all layers in the order of a step."""
    # Sampled layers keep the order of `names`; a known layer without a sample stays before the sampled layer that
    # followed it. New layers at the end of `names` come last.
    sampled = set(names)
    new = [name for name in names if name not in known][: most - len(known)]
    before: dict[str, list[str]] = {}
    others: list[str] = []
    for name in known:
        if name in sampled:
            before[name], others = others, []
        else:
            others.append(name)
    order: list[str] = []
    waiting: list[str] = []
    for name in names:
        if name in before:
            order += [*before[name], *waiting, name]
            waiting = []
        elif name in new:
            waiting.append(name)
    return order + others + waiting
