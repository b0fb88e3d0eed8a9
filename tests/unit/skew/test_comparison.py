"""How often the members of a group are compared: at least half a second apart, however many samples arrive."""

import numpy as np

from statsd_bn.skew import MIN_SECONDS, SkewDetector

# The third member's data differ much; the second member has the same data as the first.
FIGURES = np.array([[[10.0, 0.0, 1.0, 0.01], [10.0, 0.0, 1.0, 0.01], [10.0, 5.0, 9.0, 0.4], [10.0, 0.1, 1.1, 0.01]]])


def find_members(comparison, times):
    found = [one for step, now in enumerate(times) for one in comparison.add(now, step, ["bn"], FIGURES)]
    return [[one.member for one in found if (one.other is not None) == is_copy] for is_copy in (False, True)]


def test_a_burst_of_samples_counts_once():
    comparison = SkewDetector(4)
    assert find_members(comparison, [MIN_SECONDS * sample / 50 for sample in range(50)]) == [[], []]
    assert find_members(comparison, [1.0 + MIN_SECONDS * sample for sample in range(20)]) == [[2], [1]]
