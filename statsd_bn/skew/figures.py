"""Figures: what is told of each member of a layer, from one round.

Of N values in a channel, with mean μ and variance σ², member r has n_r with the mean μ_r. The share of the variance
that lies between the members is

    η² = Σ_r n_r (μ_r - μ)² / (N σ²),    0 <= η² <= 1,

and a member's part of it is its own term. Here both are the mean over the channels that vary. So a channel counts as
much as another, whatever its scale, and the parts add up to η². Neighbouring pixels are much alike, so η² is larger
than it would be for independent values, and is good for comparisons only.

A part has no direction: where one batch happens to be a little brighter, and the next one a little darker, both have
one. What stays on one side, however little, shows in a member's shifts: how far its means lie from those of all, in
standard deviations, in some directions among the C channels that vary,

    Σ_c s_c (μ_rc - μ_c) / √(C σ²_c),    s_c = ±1.

With one sign for all, channels that go up would make up for those that go down, as where red and blue have changed
places. So the signs are as good as drawn by lot, others in each direction; a fault may hide from one, hardly from all.
"""

from functools import cache
from hashlib import shake_128

import numpy as np

from statsd_bn import limits
from statsd_bn.reduction import FloatArray

# Which number is what, and how many there are: those that people see, and behind them the shifts.
COUNT, MEAN, VARIANCE, PART = range(4)
FIGURES, DIRECTIONS = 4, 4
NUMBERS = FIGURES + DIRECTIONS
SHIFTS = slice(FIGURES, NUMBERS)

# A channel whose variance is less than this share of its mean square is rounding noise, or constant.
LEAST_VARIANCE = 1e-12

# The signs are the bits that SHAKE128 makes of this, the same everywhere.
_SIGNS = b"statsd_bn"


def figures_of(counts: FloatArray, values: FloatArray) -> FloatArray:
    """Returns the figures of the members in one round.

    Args:
        counts: values per channel of each member, shape (members,); 0 for a member without data.
        values: sums and squares, shape (members, 2, channels); finite.

    Returns:
        Shape (members, 8): the count; the mean of the channels' means; the mean of their variances; the member's part
        of η²; its four shifts. All 0 for a member without data.
    """
    sums, squares = values[:, 0], values[:, 1]
    weights = counts[:, np.newaxis]
    total = counts.sum()
    found = np.zeros((len(counts), NUMBERS))
    if not total:
        return found
    with np.errstate(all="ignore"):
        means = np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)
        power = np.divide(squares, weights, out=np.zeros_like(squares), where=weights > 0)
        mean, all_power = sums.sum(axis=0) / total, squares.sum(axis=0) / total
        variance = all_power - mean * mean
        varies = variance > LEAST_VARIANCE * all_power
        distances = means - mean
        terms = weights * distances**2
        parts = np.divide(terms, total * variance, out=np.zeros_like(terms), where=varies)
        np.minimum(parts, 1.0, out=parts)
        squares_apart = np.divide(parts * total, weights, out=np.zeros_like(parts), where=weights > 0)
        found[:, COUNT] = counts
        found[:, MEAN] = means.mean(axis=1)
        found[:, VARIANCE] = np.maximum(power - means * means, 0.0).mean(axis=1)
        number = max(1, int(np.count_nonzero(varies)))
        found[:, PART] = parts.sum(axis=1) / number
        found[:, SHIFTS] = np.copysign(np.sqrt(squares_apart), distances) @ signs(len(mean)) / np.sqrt(number)
    return found


def signs(channels: int) -> FloatArray:
    """Returns the channels' signs in each direction, 1 or -1, shape (channels, 4)."""
    return _all_signs()[:channels]


@cache
def _all_signs() -> FloatArray:
    drawn = np.frombuffer(shake_128(_SIGNS).digest(limits.MAX_CHANNELS * DIRECTIONS // 8), np.uint8)
    return np.array([1.0, -1.0])[np.unpackbits(drawn)].reshape(-1, DIRECTIONS)
