"""Shift: whose means lie to one side of the others', a little, in one look as in the next.

One batch is brighter and the next one darker, so an honest member's shifts cancel out over many looks. Those of a
member whose channels are swapped do not, even where each is too small for `statsd_bn.skew.outliers` to tell it from
chance.
"""

import math

import numpy as np

from statsd_bn.reduction import FloatArray
from statsd_bn.skew import DIRECTIONS

# What a look weighs beside the next one: an average over some thirty looks, of which there are enough after these.
DECAY = 0.97
LEAST_LOOKS = 20

# How many of its standard errors, and how many times the distance of the next one, a member lies off. Of members that
# each read the same few samples all the time some do differ for good, by chance; but one of them not that much more.
LEAST_ERRORS, LEAST_RATIO = 7.0, 4.0

# Among few members two or three are close together now and then, though all differ. But that is hardly so in all
# directions: how many times as far off a member lies as the others do there, all directions taken together.
LEAST_POOLED_RATIO = 9.0

# Less is no harm to anybody: in standard deviations of a value.
LEAST_SHIFT = 0.1

# One look counts for at most so many times what is usual, or for so much where looks hardly vary.
MOST_DEVIATIONS, MOST_SHIFT = 4.0, 0.5

TINY = 1e-150

# Among three, two that happen to be alike make the third one odd.
LEAST_MEMBERS = 4

# What is kept for each member.
NUMBERS = 2 * DIRECTIONS


class Shift:
    """That of one layer.

    Args:
        members: how many the group has.
    """

    __slots__ = ("_looks", "_mean", "_share", "_square", "_weight")

    def __init__(self, members: int) -> None:
        self._mean = np.zeros((DIRECTIONS, members))
        self._square = np.zeros((DIRECTIONS, members))
        self._looks = 0
        self._weight = 0.0
        # The sum of the squares of all looks' weights: by how much the average varies less than one look does.
        self._share = 0.0

    def add(self, shifts: FloatArray) -> None:
        """Take a look: the members' shifts, shape (directions, members)."""
        if self._looks:
            usual = np.sqrt(np.median(self._square, axis=1, keepdims=True))
            most = np.maximum(MOST_DEVIATIONS * usual, MOST_SHIFT)
            shifts = shifts.clip(-most, most)
        self._looks += 1
        self._weight = DECAY * self._weight + 1.0
        new = 1.0 / self._weight
        self._share = (1.0 - new) ** 2 * self._share + new * new
        self._mean += new * (shifts - self._mean)
        self._square += new * (shifts * shifts - self._square)

    def outlier(self) -> int | None:
        """Returns the index of the member that lies to one side, in whichever direction, if one does."""
        if self._mean.shape[1] < LEAST_MEMBERS or self._looks < LEAST_LOOKS:
            return None
        for at, (mean, square) in enumerate(zip(self._mean, self._square, strict=True)):
            who = _outlier(mean, square, self._share)
            if who is not None and self._pooled_ratio(who, at) > LEAST_POOLED_RATIO:
                return who
        return None

    def _pooled_ratio(self, member: int, direction: int) -> float:
        """How many times as far off a member lies in a direction as the others do in all."""
        variances = np.maximum(self._square - self._mean**2, 0.0)
        # In some directions looks differ more than in others.
        usual = np.maximum(np.sqrt(np.median(variances, axis=1, keepdims=True)), TINY)
        others = np.delete(self._mean, member, axis=1)
        middle = np.median(others, axis=1, keepdims=True)
        distance = abs(self._mean[direction, member] - middle[direction, 0]) / usual[direction, 0]
        return float(distance / max(math.sqrt(float(np.mean(((others - middle) / usual) ** 2))), TINY))

    def of(self, member: int) -> float:
        """How far a member's average lies from the others', in standard deviations, where it lies farthest."""
        others = np.delete(self._mean, member, axis=1)
        return float(abs(self._mean[:, member] - np.median(others, axis=1)).max())


def _outlier(mean: FloatArray, square: FloatArray, share: float) -> int | None:
    """That in one direction, by the averages of the members' shifts and of the squares of these, shape (members,)."""
    who = int(abs(mean - np.median(mean)).argmax())
    others = np.delete(mean, who)
    middle = np.median(others)
    distance = abs(mean[who] - middle)
    if distance < LEAST_SHIFT or distance < LEAST_ERRORS * _error(who, mean, square, share):
        return None
    return who if distance > LEAST_RATIO * abs(others - middle).max() else None


def _error(member: int, mean: FloatArray, square: FloatArray, share: float) -> float:
    """Standard error of a member's distance from the others."""
    variances = np.maximum(square - mean**2, 0.0)
    of_one_look = max(float(variances[member]), float(np.median(variances)))
    return math.sqrt(of_one_look * share * (1.0 + 1.0 / (len(variances) - 1)))
