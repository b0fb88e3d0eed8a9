"""Two or three members: who has left its own past is named, and what all do alike is no finding."""

import numpy as np
import pytest

from statsd_bn.skew import COUNT, MEAN, NUMBERS, VARIANCE, figures_of
from statsd_bn.skew.comparison import Comparison
from statsd_bn.skew.few import IN_A_ROW, Apart, Changed
from statsd_bn.skew.in_words import in_words
from statsd_bn.skew.past import LEAST_PAST, RECENT

LAYERS = ["stem", "head"]
IMAGES, CHANNELS = 8, 16

# The last look before the fault.
BEFORE = 50


class Job:
    """Figures of batches of images; each image has a level of its own, so one batch is unlike the next."""

    def __init__(self, members=2, seed=0, levels=1.0, noise=0.5):
        self.levels, self.noise = levels, noise
        self.rng = np.random.default_rng(seed)
        self.comparison = Comparison(members)
        self.members, self.looks, self.found = members, 0, []

    def look(self, *changes, channels=CHANNELS):
        """Each of `changes` takes the images, (members, images, channels, pixels), and returns others."""
        values = []
        for _ in LAYERS:
            levels = self.rng.normal(0, self.levels, (self.members, IMAGES, channels, 1))
            images = levels + self.rng.normal(0, self.noise, (self.members, IMAGES, channels, 16))
            for change in changes:
                images = change(images)
            flat = images.swapaxes(1, 2).reshape(self.members, channels, -1)
            sums = np.stack([flat.sum(axis=2), (flat**2).sum(axis=2)], axis=1)
            values.append(figures_of(np.full(self.members, float(flat.shape[2])), sums))
        self.found += self.comparison.look(float(self.looks), 10 * self.looks, LAYERS, np.stack(values))
        self.looks += 1

    def looks_with(self, number, *changes):
        for _ in range(number):
            self.look(*changes)
        return self.found


def of(member, change):
    """The change of one member's images."""

    def changed(images):
        images = images.copy()
        images[member] = change(images[member])
        return images

    return changed


CHANGES = {
    "normalised otherwise": lambda images: 1.6 * images + 0.7,
    "255 times": lambda images: 255.0 * images,
    "one image again and again": lambda images: np.broadcast_to(images[:1], images.shape),
    "shifted": lambda images: images + 1.0,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("members", "odd"), [(2, 0), (2, 1), (3, 1)])
def test_whose_data_change_in_the_middle_is_named_once(change, members, odd):
    job = Job(members)
    assert job.looks_with(BEFORE) == []
    found = job.looks_with(60, of(odd, change))
    assert [one.member for one in found if isinstance(one, Changed)] == [odd]
    assert {one.member for one in found} == {odd}
    (changed,) = (one for one in found if isinstance(one, Changed))
    assert (changed.layer, changed.layers) == ("stem", len(LAYERS))
    assert 10 * BEFORE <= changed.since <= 10 * (BEFORE + 2 * RECENT)


@pytest.mark.parametrize("odd", [0, 1])
def test_one_image_again_and_again_is_seen_where_neither_mean_nor_variance_change(odd):
    job = Job(levels=0.3, noise=1.0)
    job.looks_with(BEFORE)
    (found,) = job.looks_with(60, of(odd, CHANGES["one image again and again"]))
    assert isinstance(found, Changed)
    assert found.member == odd
    assert found.own.variance == pytest.approx(1.0, abs=0.2)
    assert found.own.scatter > 2 * found.others.scatter


def test_where_both_have_moved_much_but_one_a_little_more_nobody_is_named():
    job = Job()
    job.looks_with(BEFORE)
    assert job.looks_with(60, of(0, lambda images: 2.0 * images), of(1, lambda images: 2.6 * images)) == []


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("members", [2, 3])
def test_what_all_do_alike_is_the_schedule(change, members):
    job = Job(members)
    job.looks_with(BEFORE)
    per_member = [of(member, change) for member in range(members)]
    assert job.looks_with(60, *per_member) == []


def test_learning_that_moves_both_is_no_finding():
    job = Job()
    for look in range(300):
        job.look(lambda images, look=look: (1 + look / 30) * images + look / 50)
    assert job.found == []


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
@pytest.mark.parametrize("members", [2, 3])
def test_chance_is_no_finding(seed, members):
    assert Job(members, seed).looks_with(500) == []


@pytest.mark.parametrize("name", ["normalised otherwise", "255 times", "shifted"])
def test_of_two_that_differ_from_the_first_step_it_is_told_but_not_which(name):
    job = Job()
    (found,) = job.looks_with(100, of(1, CHANGES[name]))
    assert isinstance(found, Apart)
    assert found.layer == "stem"
    assert found.since <= 10 * (LEAST_PAST + IN_A_ROW)


def test_two_with_the_same_few_samples_each_for_good_are_not_apart():
    rng = np.random.default_rng(1)
    levels = rng.normal(0, 1, (2, IMAGES, CHANNELS, 1))
    noise = rng.normal(0, 0.5, (2, IMAGES, CHANNELS, 16))
    assert Job().looks_with(200, lambda images: levels + noise + 0.1 * images) == []


def test_an_odd_batch_now_and_then_is_no_finding():
    job = Job()
    for look in range(300):
        job.look(*([of(0, CHANGES["255 times"])] if look % 40 == 39 else []))
    assert job.found == []


def test_before_there_is_a_past_nobody_is_named():
    job = Job()
    job.looks_with(LEAST_PAST - 5)
    found = job.looks_with(100, of(0, CHANGES["255 times"]))
    assert [type(one) for one in found] == [Apart]


@pytest.mark.parametrize("mean", [0.0, 1e308])
def test_whatever_a_member_says_nothing_overflows(mean):
    """A Digest may say any finite number."""
    figures = np.zeros((2, 2, NUMBERS))
    figures[..., COUNT] = 8.0
    figures[:, 0, VARIANCE], figures[:, 0, MEAN] = 1.7e308, mean
    comparison, found = Comparison(2), []
    for look in range(120):
        if look > 80:
            figures[:, 1, MEAN] = -mean
        found += comparison.look(float(look), look, LAYERS, figures)
    (apart,) = found
    assert isinstance(apart, Apart)
    assert "read different data" in in_words(apart, ["rank 0", "rank 1"])


def test_who_has_no_data_for_a_while_has_not_changed():
    """An empty shard is none of its own data."""
    job, empty = Job(), []
    job.looks_with(BEFORE)
    none = np.zeros((2, 2, CHANNELS))
    none[0] = 1.0
    for look in range(40):
        values = np.stack([figures_of(np.array([64.0, 0.0]), none)] * len(LAYERS))
        empty += job.comparison.look(100.0 + look, 1000, LAYERS, values)
    assert empty == []


def test_among_four_the_majority_says_it():
    job = Job(4)
    job.looks_with(BEFORE)
    found = job.looks_with(60, of(2, CHANGES["255 times"]))
    assert not any(isinstance(one, Changed) for one in found)
    assert {one.member for one in found} == {2}


def test_the_layers_are_weighed():
    job = Job()
    assert job.comparison.more_for(LAYERS) > 0
    job.look()
    assert job.comparison.more_for(LAYERS) == 0
    assert job.comparison.kept > 2 * 8192


def test_what_was_found_in_words():
    changed, apart = Job(), Job()
    changed.looks_with(BEFORE)
    (told,) = changed.looks_with(40, of(1, CHANGES["normalised otherwise"]))
    text = in_words(told, ["rank 0", "rank 1"])
    assert text.startswith("rank 1 has changed since step 5")
    assert "unlike the others: stem (its variance is " in text
    (told,) = apart.looks_with(100, of(0, CHANGES["255 times"]))
    text = in_words(told, ["rank 0", "rank 1"])
    assert text.startswith("rank 0 and rank 1 read different data, and of two ranks nobody can tell which is the odd")
    assert "the variance of the first is 6." in text
