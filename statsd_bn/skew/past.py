"""Past: what was usual for each of two or three members until a while ago, and who has left that.

It is made of looks at one layer; the latest of them do not belong to it yet, and are compared with it.
"""

import math
from dataclasses import dataclass

import numpy as np

from statsd_bn.reduction import FloatArray
from statsd_bn.skew.figures import MEAN, PART, VARIANCE

# The latest looks, and how many there have to be before them. A look of the past weighs so much beside the next one.
RECENT, LEAST_PAST, DECAY = 16, 20, 0.98

# How far one member has to have moved: in standard errors, in the logarithm of its variance, in standard deviations of
# its values; and how many times as far as any other.
LEAST_ERRORS, LEAST_LOG, LEAST_SHIFT, LEAST_RATIO = 7.0, math.log(1.5), 0.1, 2.0

# A member that brings one image again and again stays where it was on average, and only moves more from look to look:
# how many times as much as before, and as any other does. The distance between the members has grown as well.
LEAST_SCATTER, LEAST_SCATTER_RATIO, LEAST_ETA2_RATIO = 2.5, 2.0, 2.0

# How far one look may lie from the usual ones, in the logarithm of the variance and in standard deviations.
MOST_MOVE = np.array([math.log(10.0), 1.0])

# The median of the squares of normal values, whose mean is 1.
MEDIAN_SQUARE = 0.455

# One step from a look to the next counts for at most so many times the usual one.
MOST_STEPS = 10.0

# Of a member's figures, what is kept of a look.
RAW = [MEAN, VARIANCE, PART]

# The mean of constant data is any number of standard deviations.
MOST_MEAN = 1e6
TINY = 1e-150


@dataclass(frozen=True, slots=True)
class Move:
    """How a member's figures are beside its own past.

    Attributes:
        variance: how many times its earlier variance it has now.
        shift: how far its mean lies from where it was, in standard deviations.
        scatter: how many times as much both vary from look to look.
    """

    variance: float
    shift: float
    scatter: float


class Past:
    """What was usual for each member of one layer until a while ago.

    Args:
        raw: the first look: mean, variance and part of η² of each member, shape (members, 3).
    """

    def __init__(self, raw: FloatArray) -> None:
        self._variances = raw[:, 1]
        self._usual = self._latest = features_of(raw, self._variances)
        self._eta2 = float(raw[:, 2].sum())
        # Half the squares of the steps from look to look: of the features, and of the members' distances in them.
        self._steps = np.zeros_like(self._usual)
        self._steps_apart = np.zeros_like(self._usual)
        self.looks = 1

    def add(self, raw: FloatArray) -> None:
        """Take one more look."""
        features = self._limited(raw)
        step = features - self._latest
        weight = max(1 / self.looks, 1 - DECAY)
        self._steps = self._steps + weight * (step**2 / 2 - self._steps)
        self._steps_apart = self._steps_apart + weight * (_from_others(step) ** 2 / 2 - self._steps_apart)
        self.looks += 1
        weight = max(1 / self.looks, 1 - DECAY)
        self._usual = self._usual + weight * (features - self._usual)
        self._eta2 += weight * (float(raw[:, 2].sum()) - self._eta2)
        self._latest = features

    def changed(self, recent: FloatArray) -> int | None:
        """Index of the member that has changed, where the others have not; `recent` has shape (looks, members, 3)."""
        moved, scatter = self._moved(recent), self._scatter(recent)
        beside = abs(_from_others(moved))
        errors = np.sqrt(self._most_steps_apart(recent) * (1 / RECENT + 1 - DECAY))
        shown = beside / np.maximum((LEAST_LOG, LEAST_SHIFT), LEAST_ERRORS * errors)
        # The means move with the weights, which learn from a fault on any member.
        feature = 0 if abs(moved[:, 0]).max() > LEAST_LOG else 1
        who, ratio = _first(abs(moved[:, feature]))
        if shown[who, feature] > 1 and ratio > LEAST_RATIO:
            return who
        who, ratio = _first(scatter)
        has_grown = recent[..., 2].sum(axis=1).mean() > LEAST_ETA2_RATIO * self._eta2
        return who if has_grown and scatter[who] > LEAST_SCATTER and ratio > LEAST_SCATTER_RATIO else None

    def moves(self, recent: FloatArray) -> list[Move]:
        """How each member has moved."""
        scatter = self._scatter(recent).tolist()
        moved = self._moved(recent).tolist()
        return [Move(math.exp(log), abs(far), times) for (log, far), times in zip(moved, scatter, strict=True)]

    def _limited(self, raw: FloatArray) -> FloatArray:
        """Features of looks, not so far from the usual ones that a single odd batch could count for many."""
        features = features_of(raw, self._variances)
        limited: FloatArray = features.clip(self._usual - MOST_MOVE, self._usual + MOST_MOVE)
        return limited

    def _moved(self, recent: FloatArray) -> FloatArray:
        """How far the features have moved, shape (members, 2)."""
        moved: FloatArray = self._limited(recent).mean(axis=0) - self._usual
        return moved

    def _most_steps_apart(self, recent: FloatArray) -> FloatArray:
        """By how much the members' distances vary from look to look, as usual or now, whichever is more."""
        steps = np.diff(_from_others(self._limited(recent)), axis=0) ** 2 / 2
        # The median leaves out the one step in which a member changes.
        now: FloatArray = np.sort(steps, axis=0)[len(steps) // 2] / MEDIAN_SQUARE
        return np.maximum(self._steps_apart, now)

    def _scatter(self, recent: FloatArray) -> FloatArray:
        """How many times as much they vary from look to look, shape (members,)."""
        usual = np.maximum(self._steps, TINY)
        steps = np.diff(self._limited(recent), axis=0) ** 2 / 2
        times: FloatArray = np.minimum(steps / usual, MOST_STEPS).mean(axis=(0, 2))
        return times


def features_of(raw: FloatArray, variances: FloatArray) -> FloatArray:
    """The logarithm of each member's variance, and its mean in standard deviations, shape (..., members, 2).

    Args:
        raw: mean and variance, and more, of each member, shape (..., members, 3).
        variances: earlier ones; in units of these or its own, whichever is greater, another scale is no other mean.
    """
    # Whatever a member says, nothing overflows here, nor in what is made of it.
    own = raw[..., 1].clip(TINY, 1 / TINY)
    means = raw[..., 0].clip(-1 / TINY, 1 / TINY) / np.sqrt(np.maximum(own, variances))
    return np.stack((np.log(own), means.clip(-MOST_MEAN, MOST_MEAN)), axis=-1)


def _first(values: FloatArray) -> tuple[int, float]:
    """Index of the member with the greatest value, and how many times the next one's it is."""
    ascending = sorted(values.tolist())
    return int(values.argmax()), ascending[-1] / max(ascending[-2], TINY)


def _from_others(values: FloatArray) -> FloatArray:
    """Each member's values beside the mean of the others, which are one or two; shape (..., members, features)."""
    others = (values.sum(axis=-2, keepdims=True) - values) / (values.shape[-2] - 1)
    distances: FloatArray = values - others
    return distances
