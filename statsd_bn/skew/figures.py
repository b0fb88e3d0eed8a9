"""Figures: four numbers for each member of a layer, from one round.

Of N values in a channel, with mean μ and variance σ², member r has n_r with the mean μ_r. The share of the variance
that lies between the members is

    η² = Σ_r n_r (μ_r - μ)² / (N σ²),    0 <= η² <= 1,

and a member's part of it is its own term. Here both are the mean over the channels that vary. So a channel counts as
much as another, whatever its scale, and the parts add up to η². Neighbouring pixels are much alike, so η² is larger
than it would be for independent values, and is good for comparisons only.
"""

import numpy as np

from statsd_bn.reduction import FloatArray

# Which number is what, and how many there are.
COUNT, MEAN, VARIANCE, PART = range(4)
FIGURES = 4

# A channel whose variance is less than this share of its mean square is rounding noise, or constant.
LEAST_VARIANCE = 1e-12


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
        found[:, PART] = np.minimum(parts, 1.0).sum(axis=1) / max(1, np.count_nonzero(varies))
    return found
