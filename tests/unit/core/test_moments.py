import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statsd_bn import Moments


def moments(x: np.ndarray) -> Moments:
    if not len(x):
        return Moments.empty(x.shape[1])
    mean = x.mean(axis=0, dtype=np.float64)
    return Moments.from_centred(len(x), mean, ((x - mean) ** 2).sum(axis=0))


def assert_close(one: Moments, other: Moments) -> None:
    assert one.count == other.count
    np.testing.assert_allclose(one.sums, other.sums, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(one.squares, other.squares, rtol=1e-12, atol=1e-9)


@st.composite
def batches(draw: st.DrawFn, sizes: st.SearchStrategy[list[int]]) -> list[np.ndarray]:
    seed = draw(st.integers(0, 2**32 - 1))
    scale = draw(st.sampled_from([1e-3, 1.0, 1e3]))
    shift = draw(st.sampled_from([0.0, -5.0, 100.0]))
    generator = np.random.default_rng(seed)
    return [scale * (generator.normal(size=(size, 3)) + shift) for size in draw(sizes)]


part_sizes = st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) >= 2)


@given(batches(st.lists(st.integers(0, 7), min_size=3, max_size=3)))
def test_merge_is_associative_up_to_rounding(parts):
    a, b, c = (moments(part) for part in parts)
    assert_close(a.merge(b).merge(c), a.merge(b.merge(c)))


@given(batches(st.lists(st.integers(1, 7), min_size=1, max_size=1)))
def test_empty_is_the_identity_of_merge(parts):
    some = moments(parts[0])
    for merged in (some.merge(Moments.empty(3)), Moments.empty(3).merge(some)):
        assert merged.count == some.count
        assert merged.vectors.tobytes() == some.vectors.tobytes()


@given(batches(part_sizes))
def test_mean_and_variance_of_unequal_parts_are_those_of_the_whole_batch(parts):
    whole = np.concatenate(parts)
    merged = Moments.empty(3)
    for part in parts:
        merged = merged.merge(moments(part))
    assert merged.count == len(whole)
    # A variance is a small difference of squares, so its error is relative to the squares.
    rounding = 1e-13 * (whole**2).mean(axis=0).max()
    np.testing.assert_allclose(merged.mean, whole.mean(axis=0), rtol=1e-12, atol=1e-12 * np.abs(whole).max())
    np.testing.assert_allclose(merged.variance(), whole.var(axis=0), rtol=1e-9, atol=rounding)
    np.testing.assert_allclose(merged.variance(unbiased=True), whole.var(axis=0, ddof=1), rtol=1e-9, atol=2 * rounding)


def test_the_vectors_that_travel_become_the_same_moments_again():
    some = moments(np.random.default_rng(0).normal(size=(5, 3)))
    again = Moments.from_vectors(some.count, some.vectors)
    assert some.vectors.shape == (2, 3)
    assert again.vectors.tobytes() == some.vectors.tobytes()
    np.testing.assert_array_equal(some.vectors[0], some.sums)


def test_a_variance_is_never_negative():
    rounded_down = Moments(3, np.array([3e8]), np.array([3e16 - 64.0]))
    assert rounded_down.variance() == 0.0


def test_nan_stays_nan():
    x = np.array([[1.0, np.nan], [2.0, 3.0]])
    found = moments(x).merge(moments(np.ones((2, 2))))
    np.testing.assert_array_equal(np.isnan(found.variance()), [False, True])
    np.testing.assert_array_equal(np.isnan(found.mean), [False, True])


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_inf_gives_an_infinite_mean_and_no_variance_and_no_warning(infinite):
    broken = Moments(4, np.array([infinite, 4.0]), np.array([np.inf, 4.0]))
    found = broken.merge(Moments.empty(2))
    np.testing.assert_array_equal(found.mean, [infinite, 1.0])
    np.testing.assert_array_equal(found.variance(), [np.nan, 0.0])


def test_opposite_infinities_cancel_to_nan_without_a_warning():
    up, down = (Moments(1, np.array([value]), np.array([np.inf])) for value in (np.inf, -np.inf))
    assert np.isnan(up.merge(down).mean)


seeds = pytest.mark.parametrize("seed", range(5))


@seeds
def test_float32_at_mean_over_std_of_1000_needs_the_stable_formula(seed):
    x = offset_batch(seed, 1_000)
    assert relative_error(x, stable(x)).max() < 1e-4
    assert relative_error(x, textbook(x)).max() > 0.01


def offset_batch(seed: int, ratio: float) -> np.ndarray:
    """Float32 of shape (C, N): numpy adds pairwise along the last axis, which is best for the textbook formula."""
    return np.random.default_rng(seed).normal(ratio, 1.0, size=(16, 4096)).astype(np.float32)


def relative_error(x: np.ndarray, variance: np.ndarray) -> np.ndarray:
    exact = x.astype(np.float64).var(axis=1)
    return np.abs(variance - exact) / exact


def stable(x: np.ndarray) -> np.ndarray:
    """The project's formula over unequal parts: sums in float32, as on a device, which are merged in float64."""
    merged = Moments.empty(len(x))
    for part in np.split(x, [17, 1000, 1003], axis=1):
        mean = part.mean(axis=1)
        centred = ((part - mean[:, None]) ** 2).sum(axis=1)
        assert centred.dtype == np.float32
        measured = mean.astype(np.float64), centred.astype(np.float64)
        merged = merged.merge(Moments.from_centred(part.shape[1], *measured))
    return merged.variance()


def textbook(x: np.ndarray) -> np.ndarray:
    """E[x²] - E[x]² in float32, as in Synchronized-BatchNorm-PyTorch."""
    found = (x**2).mean(axis=1) - x.mean(axis=1) ** 2
    assert found.dtype == np.float32
    return found
