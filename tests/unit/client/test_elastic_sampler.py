"""ElasticSampler: the rest of an epoch is split among the present members, each sample once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from client.elastic.sampler import ElasticSampler


def shares(
    size: int, world_size: int, state: dict[str, object] | None = None, *, shuffle: bool = True
) -> list[list[int]]:
    samplers = [ElasticSampler(range(size), shuffle) for _ in range(world_size)]
    for rank, sampler in enumerate(samplers):
        sampler.load_state_dict(state or {"epoch": 0, "processed_indices": []})
        sampler.reset(rank, world_size)
    return [list(sampler) for sampler in samplers]


@given(st.integers(0, 40), st.sets(st.integers(0, 39)), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_the_shares_cover_all_remaining_samples_once(size, processed, world_size, epoch, shuffle):
    done = sorted(index for index in processed if index < size)
    found = shares(size, world_size, {"epoch": epoch, "processed_indices": done}, shuffle=shuffle)
    assert sorted(itertools.chain(*found)) == sorted(set(range(size)).difference(done))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_the_order_follows_from_the_seed():
    orders = [list(ElasticSampler(range(50), seed=seed)) for seed in (4, 4, 5)]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_the_sampler_keeps_the_order_of_the_dataset():
    assert shares(5, 2, shuffle=False) == [[0, 2, 4], [1, 3]]


def test_recorded_batches_equal_the_loaders_batches():
    sampler = ElasticSampler(range(10))
    loader = DataLoader(range(10), batch_size=4, sampler=sampler)
    for index, batch in enumerate(loader):
        sampler.record_batch(index, 4)
        assert sampler.recorded[-1] == batch.tolist()
    assert sampler.is_exhausted
    assert len(loader) == 3
    sampler.reset(0, 1)
    assert (sampler.recorded, list(sampler)) == ([], [])


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_a_batch_outside_the_share_is_refused(index):
    with pytest.raises(IndexError, match=f"expected one of the 2 batches of 3 of 5 samples, got {index}"):
        ElasticSampler(range(5)).record_batch(index, 3)


@pytest.mark.parametrize("processed", [[5], [-1, 2]])
def test_a_state_of_another_dataset_is_refused(processed):
    with pytest.raises(ValueError, match="expected samples of a dataset of 5"):
        ElasticSampler(range(5)).load_state_dict({"epoch": 0, "processed_indices": processed})


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(TypeError, match="expected one with a length, so that it can be split, got generator"):
        ElasticSampler(index for index in range(3))
