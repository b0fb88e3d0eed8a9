"""Members with equal data are found after several samples, members with similar data never."""

import numpy as np

from statsd_bn.skew import COUNT, VARIANCE, Finding, SkewDetector, compute_figures
from statsd_bn.skew import DUPLICATES_IN_A_ROW as IN_A_ROW

LAYERS, MEMBERS = 3, 4
NAMES = ["a", "b", "c"]


def figures(rng, copied=()):
    """Figures of layers; for each (member, other) in `copied` the member has the data of the other."""
    data = rng.normal(0, 1, (LAYERS, MEMBERS, 16, 8))
    for member, other in copied:
        data[:, member] = data[:, other]
    values = np.stack([data.sum(axis=2), (data**2).sum(axis=2)], axis=2)
    return np.stack([compute_figures(np.full(MEMBERS, 16.0), one) for one in values])


def find_copies(group, number, *copied, first=0, seed=0):
    rng, times = np.random.default_rng(seed), range(first, first + number)
    return [found for at in times for found in group.add(float(at), 10 * at, NAMES, figures(rng, copied))]


def duplicate(member, other, since):
    return Finding(member, "a", {"since": since, "other": other})


def test_a_copy_is_found_once_with_its_step():
    group = SkewDetector(MEMBERS)
    assert find_copies(group, 5) == []
    assert find_copies(group, IN_A_ROW - 1, (3, 1), first=5) == []
    assert find_copies(group, 50, (3, 1), first=4 + IN_A_ROW, seed=1) == [duplicate(3, 1, since=50)]


def test_a_copy_must_be_equal_in_successive_samples():
    group = SkewDetector(MEMBERS)
    for start in range(0, 100, IN_A_ROW):
        assert find_copies(group, IN_A_ROW - 1, (2, 0), first=start) == []
        assert find_copies(group, 1, first=start + IN_A_ROW - 1, seed=1) == []


def test_a_pair_is_reported_once_although_it_differs_meanwhile():
    group = SkewDetector(MEMBERS)
    assert find_copies(group, IN_A_ROW, (3, 1)) == [duplicate(3, 1, since=0)]
    for start in range(IN_A_ROW, 100, IN_A_ROW + 1):
        assert find_copies(group, 1, first=start, seed=2) == []
        assert find_copies(group, IN_A_ROW, (3, 1), first=start + 1, seed=3) == []


def test_several_copies_are_each_found():
    found = find_copies(SkewDetector(MEMBERS), IN_A_ROW, (1, 0), (3, 0))
    assert found == [duplicate(1, 0, since=0), duplicate(3, 0, since=0)]


def test_one_different_layer_disproves_a_copy():
    rng, group = np.random.default_rng(0), SkewDetector(MEMBERS)
    for sample in range(3 * IN_A_ROW):
        values = figures(rng, [(3, 1)])
        values[1, 3, VARIANCE] *= 1 + 1e-12
        assert group.add(float(sample), sample, NAMES, values) == []


def test_constant_or_missing_data_are_not_copies():
    constant, empty = SkewDetector(MEMBERS), SkewDetector(MEMBERS)
    for sample in range(2 * IN_A_ROW):
        values = np.ones((LAYERS, MEMBERS, 4))
        values[..., VARIANCE] = 0.0
        assert constant.add(float(sample), sample, NAMES, values) == []
        values[..., VARIANCE], values[..., COUNT] = 1.0, 0.0
        assert empty.add(float(sample), sample, NAMES, values) == []


def test_of_two_members_the_copy_is_found():
    group = SkewDetector(2)
    found = []
    for sample in range(IN_A_ROW):
        (values,) = np.random.default_rng(sample).normal(0, 1, (1, LAYERS, 8, 5))
        rows = np.stack([values.sum(axis=1), np.square(values).sum(axis=1)], axis=1)
        both = np.stack([compute_figures(np.array([8.0, 8.0]), np.stack([one, one])) for one in rows])
        found += group.add(float(sample), sample, NAMES, both)
    assert found == [duplicate(1, 0, since=0)]
    assert found[0].describe(["rank 0 (a)", "rank 1 (b)"]) == (
        "rank 1 (b): same data as rank 0 (a) in all layers since step 0; do both read the same shard?"
    )
