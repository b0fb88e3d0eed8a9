"""The sampler keeps rows for a moment: a bounded number, of one step only, at most once a second for each layer."""

import tracemalloc
from collections import Counter
from random import Random

import numpy as np
import pytest

from statsd_bn import limits
from statsd_bn import skew_samples as samples
from statsd_bn.round_key import BACKWARD, FORWARD, RoundKey
from statsd_bn.skew_samples import SkewSampler


def key_of(layer, step=0, phase=FORWARD):
    return RoundKey("job", "world", 0, step, layer, 0, phase)


def observe(into, now, layer, step=0, *, members=2, channels=1, phase=FORWARD, replicas=None):
    replicas = replicas or (1,) * members
    rows = sum(replicas)
    values = np.arange(rows * 2.0 * channels).reshape(rows, 2, channels)
    if into.is_due(now, key := key_of(layer, step, phase)):
        into.observe(now, key, list(range(1, rows + 1)), replicas, values)
    return values


def layers(batch):
    return [sample.key.layer for sample in batch]


def test_each_layer_is_kept_once_a_second_in_the_order_of_the_rounds():
    of_one = SkewSampler()
    for n in range(50):
        for layer in ("b", "a"):
            observe(of_one, 100 + n / 100, layer, step=n)
    batch = of_one.drain(100.5)
    assert layers(batch) == ["b", "a"]
    assert [sample.key.step for sample in batch] == [0, 0]
    observe(of_one, 100.9, "b", step=90)
    assert of_one.drain(110.0) == []
    observe(of_one, 101.0, "b", step=100)
    assert layers(of_one.drain(111.0)) == ["b"]


def test_a_sample_covers_one_step_and_later_rounds_wait_for_the_next():
    of_one = SkewSampler()
    observe(of_one, 100.9, "first", step=7)
    observe(of_one, 101.0, "second", step=7)
    observe(of_one, 101.1, "first", step=8)
    assert [(sample.key.layer, sample.key.step) for sample in of_one.drain(101.15)] == [("first", 7), ("second", 7)]
    observe(of_one, 101.3, "first", step=9)
    assert [(sample.key.layer, sample.key.step) for sample in of_one.drain(103.0)] == [("first", 9)]


def test_a_sample_does_not_begin_within_a_step():
    of_one = SkewSampler()
    observe(of_one, 100.9, "first", step=7)
    observe(of_one, 101.0, "first", step=8)
    assert layers(of_one.drain(101.2)) == ["first"]
    observe(of_one, 101.3, "second", step=8)
    observe(of_one, 101.4, "first", step=9)
    observe(of_one, 101.5, "second", step=9)
    assert [(sample.key.layer, sample.key.step) for sample in of_one.drain(103.0)] == [("first", 9), ("second", 9)]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("seconds", [0.05, 0.4, 0.9])
def test_samples_have_whole_steps_even_if_the_first_round_is_within_a_step(seconds, counted):
    """Six layers, forward and backward; sampling starts at the fourth layer of the first step."""
    of_one, batches, names = SkewSampler(), [], "abcdef"
    rounds = [(layer, FORWARD) for layer in names] + [(layer, BACKWARD) for layer in reversed(names)]
    for step in range(int(60 / seconds)):
        for n, (layer, phase) in enumerate(rounds):
            now = 100 + seconds * (step + n / 20)
            if step or n >= 3:
                observe(of_one, now, layer, step * counted, phase=phase)
            batches.append("".join(layers(of_one.drain(now))))
    first, second, *others = filter(None, batches)
    assert (first, second) in (("def", "abc"), ("def", "abcdef"))
    assert len(others) >= 10
    assert set(others) == {"abcdef"}


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3, 0.5, 0.7])
def test_the_first_layers_of_a_step_are_seen_as_often_as_the_last_ones(seconds):
    of_one, seen, random = SkewSampler(), Counter(), Random(0)
    now, drain_time = 100.0, 100.05
    for step in range(int(60 / seconds)):
        for layer, part in (("first", 0.6), ("last", 0.4)):
            while drain_time <= now:
                seen.update(layers(of_one.drain(drain_time)))
                drain_time += 1 + random.uniform(0, 0.01)
            observe(of_one, now, layer, step)
            now += part * seconds * random.uniform(0.9, 1.1)
    assert seen["first"] > 0.8 * seen["last"]


@pytest.mark.parametrize(("number", "seconds"), [(155, 5.0), (200, 3.0)])
def test_the_last_layers_of_a_large_model_are_seen_in_slow_steps_too(number, seconds):
    of_one, seen = SkewSampler(), Counter()
    now, drain_time = 100.0, 100.5
    for step in range(int(200 / seconds)):
        for layer in range(number):
            while drain_time <= now:
                seen.update(layers(of_one.drain(drain_time)))
                drain_time += 1
            observe(of_one, now, f"layer {layer}", step)
            now += 0.4 * seconds / number
        now += 0.6 * seconds
    assert min(seen[f"layer {layer}"] for layer in range(number)) >= 5


def test_samples_begin_even_if_the_step_number_does_not_change():
    of_one = SkewSampler()
    for n in range(200):
        for layer in ("first", "second"):
            observe(of_one, 100 + n / 10, layer, step=n // 100)
        of_one.drain(100 + n / 10 + 0.05)
    for layer in ("first", "second"):
        observe(of_one, 200, layer, step=1)
    assert layers(of_one.drain(201)) == ["first", "second"]


def test_no_round_is_sampled_twice_or_within_a_second():
    of_one = SkewSampler()
    observe(of_one, 100.0, "a")
    assert layers(of_one.drain(100.25)) == ["a"]
    observe(of_one, 100.3, "b")
    assert of_one.drain(101.24) == []
    assert layers(of_one.drain(101.25)) == ["b"]
    assert of_one.drain(105.0) == []


def test_a_running_step_is_awaited():
    of_one = SkewSampler()
    observe(of_one, 100.0, "first", step=7)
    assert of_one.drain(100.01) == []
    observe(of_one, 100.02, "second", step=7)
    assert layers(of_one.drain(101.01)) == ["first", "second"]


def test_backward_rounds_are_not_sampled():
    of_one = SkewSampler()
    observe(of_one, 100.0, "a", phase=BACKWARD)
    assert of_one.drain(100.5) == []


def test_kept_samples_do_not_change_with_the_rows():
    of_one = SkewSampler()
    values = observe(of_one, 100.0, "a")
    before = values.copy()
    values[:] = -1.0
    (sample,) = of_one.drain(100.5)
    assert sample.values.tobytes() == before.tobytes()
    assert sample.counts.tolist() == [1.0, 2.0]


def test_the_replicas_of_a_member_are_added():
    of_one = SkewSampler()
    values = observe(of_one, 100.0, "a", replicas=(2, 1, 3))
    (sample,) = of_one.drain(100.5)
    assert sample.counts.tolist() == [1 + 2, 3, 4 + 5 + 6]
    assert sample.values.tolist() == [values[:2].sum(0).tolist(), values[2].tolist(), values[3:].sum(0).tolist()]


@pytest.mark.parametrize("number", [60, 64, 65, 250])
def test_all_layers_get_their_turn_however_many_there_are(number):
    """25 steps a second; samples are drained every 1.04 s, a little late."""
    of_one, seen = SkewSampler(), {}
    seconds = 60
    for step in range(seconds * 25):
        now = 100 + step / 25
        for layer in range(number):
            observe(of_one, now + layer * 1e-5, str(layer), step)
        if step % 26 == 25:
            batch = of_one.drain(now + 0.03)
            assert len(batch) <= samples.MAX_LAYERS
            for layer in layers(batch):
                seen[layer] = seen.get(layer, 0) + 1
    assert len(seen) == number
    fair = min(seconds, seconds * samples.MAX_LAYERS / number)
    assert min(seen.values()) >= fair / 4
    assert max(seen.values()) <= seconds + 1


def test_a_large_layer_is_sampled_in_part_within_the_byte_limit():
    of_one = SkewSampler()
    members, channels = 8, 5000
    for layer in range(100):
        values = observe(of_one, 100.0, str(layer), members=members, channels=channels)
    batch = of_one.drain(100.5)
    assert sum(sample.values.nbytes for sample in batch) <= samples.MAX_BYTES
    # 8 members, 2 vectors and 5,000 channels of 8 bytes are 640 kB.
    assert batch[0].values.tolist() == values[..., ::3].tolist()
    assert 10 < len(batch) < 100


def test_a_bounded_number_of_layer_names_is_remembered():
    of_one = SkewSampler()
    for n in range(3 * samples.MAX_SCHEDULED):
        observe(of_one, 100.0 + n / 1000, str(n), step=n)
    assert len(of_one._due) <= samples.MAX_SCHEDULED
    assert len(of_one.drain(200.0)) <= samples.MAX_LAYERS


def test_remembered_layers_count_towards_the_size():
    of_one = SkewSampler()
    tracemalloc.start()
    try:
        for number in range(300):
            observe(of_one, 1.5 * number, f"{number}".ljust(limits.MAX_NAME_BYTES, "x"), step=number)
            of_one.drain(1.5 * number + 1.0)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 300 * limits.MAX_NAME_BYTES < size <= of_one.size


def test_an_overflowing_sum_of_replicas_gives_no_warning():
    of_one = SkewSampler()
    of_one.observe(1.0, key_of("a"), (1, 1), (2,), np.full((2, 2, 1), 1e308))
    (sample,) = of_one.drain(2.0)
    assert samples.figures_of_step([sample]) is None
