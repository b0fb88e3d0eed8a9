"""The contract of `client.DDPHandler`: it splits a loop's loaders among the ranks, and gives all ranks all values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import client
from programs import contract_training_programs as programs


def test_each_loader_gives_every_sample_to_one_rank_in_another_order_each_epoch(ranks, either):
    first, second = ranks(2, programs.split_loaders, either)
    orders = [one + other for one, other in zip(first["epochs"], second["epochs"], strict=True)]
    for order in orders:
        assert sorted(order) == list(range(12))
    assert orders[0] == orders[2] != orders[1]
    assert (first["validation"], second["validation"]) == ([[0, 2, 4]], [[1, 3, 5]])
    assert first["test"] is second["test"] is None


def test_every_rank_gets_the_values_of_all_ranks_in_their_order(ranks, either):
    for found in ranks(2, programs.synchronise_measurements, either):
        expected = torch.tensor([[0, 0], [1, 1], [1, 1]], dtype=torch.bfloat16)
        torch.testing.assert_close(found["tensor"], expected, rtol=0, atol=0)
        torch.testing.assert_close(found["number"], torch.tensor([0.5, 1.5]), rtol=0, atol=0)
        torch.testing.assert_close(found["integers"], torch.tensor([0, 0, 1]), rtol=0, atol=0)
        assert (type(found["array"]), found["array"].dtype, found["array"].tolist()) == (np.ndarray, np.float32, [0, 1])
        torch.testing.assert_close(found["doubles"], torch.tensor([0.1, 0.1], dtype=torch.float64), rtol=0, atol=0)
        assert found["by rank"] == [[0], [1, 1]]
        assert found["list"] == [0, 1]
        assert {key: value.tolist() for key, value in found["dict"].items()} == {
            "loss": [0.5, 1.5],
            "labels": [0, 1, 1],
        }


def test_a_value_that_does_not_fit_is_an_error_on_all_ranks_and_they_go_on(ranks, either):
    first, second = ranks(2, programs.fail_to_synchronise, either)
    errors = {name: (first[name][0][0], second[name][0][0]) for name in first}
    assert errors == {
        "text on rank 1": ("RoundFailed", "TypeError"),
        "other dtypes": ("RoundMismatch", "RoundMismatch"),
        "other keys": ("RoundMismatch", "RoundMismatch"),
    }
    assert "rank 1: TypeError" in first["text on rank 1"][0][1]
    for found in (first, second):
        assert [behind for _, behind in found.values()] == [[0, 1]] * 3


def test_a_process_without_others_gets_its_own_values_and_all_samples():
    loop = programs.loop()
    handler = client.DDPHandler(loop)
    handler.add_distributed_samplers()
    assert sorted(torch.cat(list(loop.train_loader)).tolist()) == list(range(12))
    assert handler.mp_sync([1, 2], return_tensor=False) == [1, 2]
    assert {key: value.tolist() for key, value in handler.mp_sync_dict({"loss": 2.5}).items()} == {"loss": [2.5]}


def test_a_split_loader_has_all_settings_of_the_given_one_and_shares_are_equally_long():
    given = DataLoader(range(5), batch_size=2, collate_fn=tuple, drop_last=True)
    shares = []
    for rank in range(2):
        loader, sampler = client.DDPHandler.build_loader_sampler(given, shuffle=False, world_size=2, rank=rank)
        assert (loader.batch_size, loader.collate_fn, loader.drop_last) == (2, tuple, True)
        shares.append(list(sampler))
    assert shares == [[0, 2, 4], [1, 3, 0]]


def test_a_callbacks_handler_passes_each_epoch_to_the_samplers():
    callbacks = []
    loop = programs.loop()
    loop.callbacks_handler = SimpleNamespace(register_callbacks=callbacks.extend)
    client.DDPHandler(loop).add_distributed_samplers(world_size=2, rank=0)
    (callback,) = callbacks
    callback.register_train_loop_object(loop)
    orders = []
    for loop.epoch in range(2):
        callback.on_epoch_begin()
        orders.append(list(loop.train_loader.sampler))
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("world_size", "rank"), [(2, 2), (2, -1)])
def test_a_rank_outside_the_world_is_refused_and_no_loader_has_changed(world_size, rank):
    loop = programs.loop()
    before = vars(loop).copy()
    with pytest.raises(ValueError, match=f"rank: expected .* got {rank}"):
        client.DDPHandler(loop).add_distributed_samplers(world_size, rank)
    assert vars(loop) == before


def test_a_dataset_without_indices_is_refused_and_no_loader_has_changed():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    loop = programs.loop()
    loop.test_loader = DataLoader(Stream())
    before = vars(loop).copy()
    with pytest.raises(ValueError, match="IterableDataset Stream"):
        client.DDPHandler(loop).add_distributed_samplers(2, 0)
    assert vars(loop) == before
