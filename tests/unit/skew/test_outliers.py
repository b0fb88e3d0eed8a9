"""Whose data differ: a member stands out beside the others, soon, by the earliest layer; honest ones do not."""

import math

import numpy as np
import pytest

from statsd_bn.skew import COUNT, NUMBERS, PART, SHIFTS, VARIANCE, figures_of
from statsd_bn.skew import outliers as skew
from statsd_bn.skew.outliers import Skew
from statsd_bn.skew.shift import LEAST_SHIFT

LAYERS = ["stem", "block", "head"]


def figures(rng, members, samples=4, channels=4, odd=None, scale=1.0, shift=0.0):
    """Figures of samples that each have a level of their own, as neighbouring pixels do."""
    level = rng.normal(0, 1, (members, samples, 1, channels))
    data = level + rng.normal(0, 1, (members, samples, 16, channels))
    if odd is not None:
        data[odd] = data[odd] * scale + shift
    values = np.stack([data.sum(axis=(1, 2)), (data**2).sum(axis=(1, 2))], axis=1)
    return figures_of(np.full(members, samples * 16.0), values)


def looks(of_group, members, number=40, layers=LAYERS, seed=0, first=0, **odd):
    """So many looks, one a second and each ten steps; returns what was found and at which look."""
    rng, found = np.random.default_rng(seed), []
    for look in range(first, first + number):
        values = np.stack([figures(rng, members, **odd) for _ in layers])
        found += [(look, one) for one in of_group.look(10 * look, layers, values)]
    return found


@pytest.mark.parametrize("members", [3, 4, 8])
@pytest.mark.parametrize("how", [{"scale": 4.0}, {"scale": 0.0}, {"scale": 0.2}, {"shift": 3.0}], ids=str)
def test_one_that_is_different_from_the_first_step_on_is_found_within_half_a_minute(members, how):
    ((look, found),) = looks(Skew(members), members, odd=1, **how)
    assert skew.LEAST_LOOKS - 1 <= look <= 30
    assert (found.member, found.layer, found.layers) == (1, "stem", 3)


def test_one_that_becomes_different_is_found_with_the_step():
    of_group = Skew(4)
    assert looks(of_group, 4, 100) == []
    ((look, found),) = looks(of_group, 4, first=100, odd=3, scale=4.0)
    assert look < 120
    assert found.member == 3
    assert 1000 <= found.since < 1200


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 5))])
@pytest.mark.parametrize("members", [2, 3, 8])
def test_honest_ones_are_not(members, seed):
    assert looks(Skew(members), members, 400, seed=seed) == []


def test_beside_others_that_are_constant_one_is_infinitely_different():
    of_group, values = Skew(3), np.zeros((1, 3, NUMBERS))
    values[..., skew.COUNT] = 1.0
    values[0, 2, skew.VARIANCE] = 1e10
    (found,) = [one for look in range(20) for one in of_group.look(look, ["stem"], values)]
    assert (found.member, found.variance) == (2, math.inf)


def test_one_whose_channels_are_a_little_shifted_is_found_in_the_end():
    assert looks(Skew(8), 8, 200, odd=2, shift=0.0) == []
    ((look, found),) = looks(Skew(8), 8, 200, odd=2, shift=[0.5, -0.5, -0.5, -0.5])
    assert found.member == 2
    assert 20 <= look < 150
    assert found.shift > LEAST_SHIFT


def test_members_without_data_are_where_the_others_are():
    of_group, figures_of_8 = Skew(8), figures(np.random.default_rng(0), 8)
    figures_of_8[:, PART] = 0.01
    figures_of_8[:7, SHIFTS] = 0.3
    figures_of_8[:, VARIANCE] = 1.0
    figures_of_8[7, COUNT] = 0.0
    assert [one for look in range(60) for one in of_group.look(look, ["stem"], figures_of_8[np.newaxis])] == []


def test_it_is_told_once():
    assert len(looks(Skew(8), 8, 200, odd=1, scale=6.0)) == 1


@pytest.mark.parametrize("samples", [4, 64])
@pytest.mark.parametrize("how", [{"scale": 1e3}, {"scale": 0.0}, {"shift": 100.0}], ids=str)
def test_an_odd_batch_says_nothing(how, samples):
    of_group = Skew(4)
    for n in range(4):
        assert looks(of_group, 4, 24, first=25 * n, seed=n, samples=samples) == []
        assert looks(of_group, 4, 1, first=25 * n + 24, odd=n % 2, seed=n, samples=samples, **how) == []


def test_the_earliest_layer_is_found_in_whichever_order_they_come_first():
    of_group = Skew(3)
    looks(of_group, 3, 1, ["head"], odd=0, scale=5.0)
    looks(of_group, 3, 1, ["block", "head"], first=1, odd=0, scale=5.0)
    ((_, found),) = looks(of_group, 3, first=2, odd=0, scale=5.0)
    assert (found.layer, found.layers) == ("stem", 3)


def test_what_is_kept_is_bounded():
    of_group = Skew(64)
    one = np.zeros((1, 64, NUMBERS))
    for n in range(5000):
        more = of_group.more_for([str(n)])
        before = of_group.kept
        of_group.look(n, [str(n)], one)
        assert of_group.kept - before <= more
    assert of_group.kept <= skew.MOST_NUMBERS * skew.NUMBERS_BYTES + 1024 * skew.LAYER_BYTES


def test_members_without_data_are_no_reason():
    empty = np.zeros((5, NUMBERS))
    of_group = Skew(5)
    for n in range(50):
        assert of_group.look(n, ["a"], empty[np.newaxis]) == []
