"""How often the members of a group are compared: at least half a second apart, however many samples arrive."""

import numpy as np

from statsd_bn.skew import MIN_SECONDS, SkewDetector

# The third member's data differ much; the second member has the first one's data.
FIGURES = np.array([[[10.0, 0.0, 1.0, 0.01], [10.0, 0.0, 1.0, 0.01], [10.0, 5.0, 9.0, 0.4], [10.0, 0.1, 1.1, 0.01]]])


def looks(comparison, times):
    found = [one for step, now in enumerate(times) for one in comparison.add(now, step, ["bn"], FIGURES)]
    return [[one.member for one in found if (one.other is not None) == is_copy] for is_copy in (False, True)]


def test_a_burst_of_samples_counts_once():
    comparison = SkewDetector(4)
    assert looks(comparison, [MIN_SECONDS * look / 50 for look in range(50)]) == [[], []]
    assert looks(comparison, [1.0 + MIN_SECONDS * look for look in range(20)]) == [[2], [1]]
