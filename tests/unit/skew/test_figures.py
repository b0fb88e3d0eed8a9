"""The figures of skew against their definition, on the values themselves."""

import numpy as np
import pytest

from statsd_bn.skew import COUNT, FIGURES, MEAN, PART, VARIANCE, compute_figures


def rows_of(data):
    counts = np.array([len(one) for one in data], np.float64)
    return counts, np.array([[one.sum(axis=0), (one**2).sum(axis=0)] for one in data])


def test_the_figures_follow_the_definition():
    rng = np.random.default_rng(0)
    data = [rng.normal(r, 1 + r, (n, 5)) * 10.0 ** np.arange(-2, 3) for r, n in enumerate((7, 20, 3))]
    found = compute_figures(*rows_of(data))
    together = np.concatenate(data)
    mean, variance = together.mean(axis=0), together.var(axis=0)
    for member, one in enumerate(data):
        assert found[member, COUNT] == len(one)
        assert found[member, MEAN] == pytest.approx(one.mean())
        assert found[member, VARIANCE] == pytest.approx(one.var(axis=0).mean())
        part = (len(one) * (one.mean(axis=0) - mean) ** 2 / (len(together) * variance)).mean()
        assert found[member, PART] == pytest.approx(part)
    within = sum(len(one) * one.var(axis=0) for one in data) / len(together)
    assert found[:, PART].sum() == pytest.approx((1 - within / variance).mean())


def test_members_with_the_same_data_have_no_part():
    one = np.random.default_rng(1).normal(3, 1, (9, 4))
    assert compute_figures(*rows_of([one, one, one]))[:, PART] == pytest.approx(0, abs=1e-12)


def test_two_constant_members_have_the_whole_skew():
    found = compute_figures(*rows_of([np.zeros((4, 3)), np.ones((4, 3))]))
    assert found[:, PART].tolist() == [0.5, 0.5]


def test_a_member_without_data_has_no_figures_and_changes_none():
    one, other = np.random.default_rng(2).normal(0, 1, (2, 6, 3))
    with_nobody = compute_figures(*rows_of([one, one[:0], other]))
    assert with_nobody[1].tolist() == [0.0] * FIGURES
    assert with_nobody[[0, 2]].tobytes() == compute_figures(*rows_of([one, other])).tobytes()


def test_missing_data_and_constant_channels_give_zeros():
    assert not compute_figures(*rows_of([np.zeros((0, 2))] * 2)).any()
    found = compute_figures(*rows_of([np.full((5, 2), 0.1), np.full((7, 2), 0.1)]))
    assert found[:, PART].tolist() == [0.0, 0.0]


def test_a_constant_channel_changes_no_share_of_the_variance():
    rng = np.random.default_rng(3)
    data = [rng.normal(r, 1, (8, 2)) for r in range(3)]
    dead = [np.column_stack((one, np.full(8, 1e8 / 3))) for one in data]
    assert compute_figures(*rows_of(dead))[:, PART] == pytest.approx(compute_figures(*rows_of(data))[:, PART])


def test_the_figures_are_finite_at_the_edge_of_float64():
    found = compute_figures(np.array([1.0, 1.0]), np.array([[[1e154], [1e308]], [[-1e154], [1e307]]]))
    assert np.isfinite(found).all()
