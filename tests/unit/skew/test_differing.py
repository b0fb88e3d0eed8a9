"""Members with differing data: found soon, at the earliest layer, without false alarms."""

import re

import numpy as np
import pytest

from statsd_bn import skew
from statsd_bn.skew import COUNT, FIGURES, VARIANCE, SkewDetector, compute_figures

LAYERS = ["stem", "block", "head"]


def figures(rng, members, samples=4, channels=4, odd=None, scale=1.0, shift=0.0):
    level = rng.normal(0, 1, (members, samples, 1, channels))
    data = level + rng.normal(0, 1, (members, samples, 16, channels))
    if odd is not None:
        data[odd] = data[odd] * scale + shift
    values = np.stack([data.sum(axis=(1, 2)), (data**2).sum(axis=(1, 2))], axis=1)
    return compute_figures(np.full(members, samples * 16.0), values)


def find_differing(of_group, members, number=40, layers=LAYERS, seed=0, first=0, **odd):
    rng, found = np.random.default_rng(seed), []
    for sample in range(first, first + number):
        values = np.stack([figures(rng, members, **odd) for _ in layers])
        found += [(sample, one) for one in of_group.add(float(sample), 10 * sample, layers, values)]
    return found


@pytest.mark.parametrize("members", [3, 4, 8])
@pytest.mark.parametrize("how", [{"scale": 4.0}, {"scale": 0.0}, {"scale": 0.2}, {"shift": 3.0}], ids=str)
def test_a_member_that_always_differs_is_found_within_half_a_minute(members, how):
    ((sample, found),) = find_differing(SkewDetector(members), members, odd=1, **how)
    assert skew.WINDOW - 1 <= sample <= 30
    assert (found.member, found.layer, found.numbers["layers"]) == (1, "stem", 3)


def test_a_member_that_begins_to_differ_is_found_with_the_step():
    of_group = SkewDetector(4)
    assert find_differing(of_group, 4, 100) == []
    ((sample, found),) = find_differing(of_group, 4, first=100, odd=3, scale=4.0)
    assert sample < 120
    assert found.member == 3
    assert 1000 <= found.numbers["since"] < 1200


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
@pytest.mark.parametrize("members", [2, 3, 8])
def test_equal_members_are_not_found(members, seed):
    assert find_differing(SkewDetector(members), members, 400, seed=seed) == []


def test_a_member_among_constant_ones_differs_by_the_maximal_ratio():
    of_group, values = SkewDetector(3), np.zeros((1, 3, FIGURES))
    values[..., COUNT] = 1.0
    values[0, 2, VARIANCE] = 1e10
    (found,) = [one for sample in range(20) for one in of_group.add(float(sample), sample, ["stem"], values)]
    assert (found.member, found.numbers["variance"]) == (2, skew.MAX_RATIO)


def test_members_without_data_are_left_out():
    of_group, values = SkewDetector(8), figures(np.random.default_rng(0), 8)
    values[7] = 0.0
    values[[1, 3], COUNT] = 0.0
    assert [one for n in range(60) for one in of_group.add(float(n), n, ["stem"], values[np.newaxis])] == []


@pytest.mark.parametrize("samples", [4, 64])
@pytest.mark.parametrize("how", [{"scale": 1e3}, {"scale": 0.0}, {"shift": 100.0}], ids=str)
def test_one_odd_batch_proves_nothing(how, samples):
    of_group = SkewDetector(4)
    for n in range(4):
        assert find_differing(of_group, 4, 24, first=25 * n, seed=n, samples=samples) == []
        assert find_differing(of_group, 4, 1, first=25 * n + 24, odd=n % 2, seed=n, samples=samples, **how) == []


def test_the_earliest_layer_is_found_whichever_layer_is_sampled_first():
    of_group = SkewDetector(3)
    find_differing(of_group, 3, 1, ["head"], odd=0, scale=5.0)
    find_differing(of_group, 3, 1, ["block", "head"], first=1, odd=0, scale=5.0)
    ((_, found),) = find_differing(of_group, 3, first=2, odd=0, scale=5.0)
    assert (found.layer, found.numbers["layers"]) == ("stem", 3)


def test_layers_sampled_apart_get_their_order_from_a_sample_of_all():
    of_group = SkewDetector(3)
    for sample, layers in enumerate((["block", "head"], ["stem"], LAYERS, ["stem", "head"], ["stem", "tail"])):
        find_differing(of_group, 3, 1, layers, first=sample)
    assert of_group.averages(0, 2**20)[1] == [*LAYERS, "tail"]


def test_kept_samples_are_bounded():
    of_group = SkewDetector(64)
    one = np.zeros((1, 64, FIGURES))
    for n in range(5000):
        more = of_group.growth([str(n)])
        before = of_group.size
        of_group.add(float(n), n, [str(n)], one)
        assert of_group.size - before <= more
    assert of_group.size <= skew.MAX_LAYER_MEMBERS * skew.MEMBER_BYTES + 1024 * skew.LAYER_BYTES


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"scale": 5.0}, "its activations vary 2\\d times as much as the others'"),
        ({"scale": 0.0}, "its activations vary 0% as much as the others'"),
        ({"shift": 3.0}, r"its mean is [12]\.\d standard deviations off the others'"),
    ],
    ids=str,
)
def test_a_finding_is_a_sentence(how, what):
    ((_, found),) = find_differing(SkewDetector(4), 4, odd=2, **how)
    text = found.describe(["rank 0", "rank 1", "rank 2 (host-b, pid 812)", "rank 3"])
    pattern = rf"rank 2 \(host-b, pid 812\): since step \d+ {what} in stem, and differ in 2 later layers"
    assert re.fullmatch(pattern, text), text


def test_a_finding_without_a_strong_sign_gives_the_parts():
    of = {"since": 64, "layers": 1, "variance": 1.1, "shift": 0.1, "part": 0.27, "usual": 0.004}
    text = skew.describe_outlier("bn1", **of)
    assert text == "since step 64 27% of the variance comes from it, and under 1% from another rank, in bn1"


def test_a_finding_is_over_once_the_samples_no_longer_show_it():
    of_group = SkewDetector(4)
    ((_, found),) = find_differing(of_group, 4, 30, odd=3, scale=4.0)
    assert of_group.is_current(found)
    find_differing(of_group, 4, skew.MAX_ABSENCE, first=30)
    assert of_group.is_current(found), "at first the window still had enough odd samples"
    find_differing(of_group, 4, skew.WINDOW, first=30 + skew.MAX_ABSENCE)
    assert not of_group.is_current(found)
    find_differing(of_group, 4, 2 * skew.WINDOW, first=100, odd=3, scale=4.0)
    assert of_group.is_current(found)


def test_a_member_that_stopped_differing_is_found_too():
    of_group = SkewDetector(4)
    assert find_differing(of_group, 4, skew.WINDOW // 2, odd=1, scale=20.0) == []
    ((_, found),) = find_differing(of_group, 4, skew.WINDOW, first=skew.WINDOW // 2)
    assert (found.member, found.layer) == (1, "stem")


def test_members_that_all_differ_have_no_odd_one():
    values = np.tile([10.0, 0.0, 1.0, 0.01], (1, 4, 1))
    values[0, :, VARIANCE] = 3.0 ** np.arange(4)
    of_group = SkewDetector(4)
    assert [one for sample in range(60) for one in of_group.add(float(sample), sample, ["stem"], values)] == []


@pytest.mark.parametrize("how", [{"scale": 30.0}, {"shift": 30.0}], ids=str)
def test_of_two_members_neither_is_named(how):
    assert find_differing(SkewDetector(2), 2, 100, odd=1, **how) == []
