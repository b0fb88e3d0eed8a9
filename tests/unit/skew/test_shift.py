"""Whose means lie to one side: little by little, over many looks, and nobody by chance."""

import numpy as np
import pytest

from statsd_bn.skew import DIRECTIONS, shift
from statsd_bn.skew.shift import Shift

NOISE = 0.2


def outliers(members, looks, seed=0, noise=NOISE, shifts=None, odd=(), kept=None, means=0.0):
    """What is found after each look, as (look, member).

    `shifts` lie under the noise in the last direction, and in the looks that are `odd` the first member is far off.
    """
    rng, of_layer, found = np.random.default_rng(seed), Shift(members), []
    for look in range(looks):
        values = means + rng.normal(0, noise, (DIRECTIONS, members))
        if shifts is not None:
            values[-1] += shifts
        if look in odd:
            values[:, 0] += 1e6
        of_layer.add(values - values.mean(axis=1, keepdims=True))
        who = of_layer.outlier()
        found += [(look, who)] if who is not None else []
    if kept is not None:
        kept.append(of_layer)
    return found


@pytest.mark.parametrize(("members", "size"), [(4, 1.5 * NOISE), (8, 1.5 * NOISE), (64, 2.0 * NOISE)])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_one_that_lies_to_one_side_hardly_more_than_a_look_varies_is_found(members, size, side):
    found = outliers(members, 200, shifts=[0.0, side * size, *[0.0] * (members - 2)])
    assert {who for _, who in found} == {1}
    assert found[0][0] < 120
    assert found[-1][0] == 199


def test_where_looks_hardly_vary_it_is_found_too():
    found = outliers(8, 100, noise=0.002, shifts=[0.0] * 5 + [0.2, 0.0, 0.0])
    assert found[0] == (shift.LEAST_LOOKS - 1, 5)
    assert outliers(8, 600, noise=0.002, odd=set(range(30, 600, 25))) == []


def test_its_distance_from_the_others_is_told():
    kept = []
    outliers(8, 400, shifts=[0.0] * 7 + [0.3], kept=kept)
    assert kept[0].of(7) == pytest.approx(0.3, abs=0.08)
    assert abs(kept[0].of(0)) < 0.08


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("members", [4, 8, 64])
def test_chance_is_not(members, seed):
    assert outliers(members, 1000, seed=seed) == []


@pytest.mark.parametrize("seed", range(5))
def test_members_that_all_differ_a_little_for_good_are_not(seed):
    shifts = np.random.default_rng(100 + seed).normal(0, 0.15 * NOISE, 8)
    assert outliers(8, 1000, seed=seed, shifts=shifts) == []


@pytest.mark.parametrize("deviation", [0.3 * NOISE, NOISE])
def test_of_four_that_each_read_the_same_samples_hardly_one_is(deviation):
    """Without a look at all directions together, 11 and 19 of these 20 have an alarm."""
    draws = [np.random.default_rng(seed).normal(0, deviation, (DIRECTIONS, 4)) for seed in range(20)]
    alarms = sum(bool(outliers(4, 300, seed=seed, means=means)) for seed, means in enumerate(draws))
    assert alarms == 0


def test_what_is_there_for_good_but_tiny_is_not():
    tiny = 0.8 * shift.LEAST_SHIFT
    assert outliers(8, 500, noise=tiny / 100, shifts=[tiny, *[0.0] * 7]) == []
    assert outliers(8, 500, noise=tiny / 100, shifts=[2 * tiny, *[0.0] * 7]) != []


def test_an_odd_batch_now_and_then_is_not():
    assert outliers(8, 600, odd=set(range(30, 600, 25))) == []


def test_among_three_nobody_is_named():
    assert outliers(3, 300, shifts=[1.0, 0.0, 0.0]) == []


def test_before_there_are_enough_looks_nobody_is():
    found = outliers(8, 60, shifts=[1.0, *[0.0] * 7])
    assert found[0] == (shift.LEAST_LOOKS - 1, 0)


def test_members_that_never_differ_end_nothing():
    assert outliers(8, 50, noise=0.0) == []
