"""A split loader equals the original one, with one member's samples."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from client import DDPHandler
from client.training.ddp_handler import COPIED
from statsd_bn.errors import ConfigurationError
from support.memory_members import MemoryMaster, in_threads
from support.sentences import says

SAMPLES = list(range(10))


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


class OfUnknownLength(Dataset):
    def __getitem__(self, index):
        return index


class AbstractCallback:
    """Like aitoolbox's: `CallbacksHandler` accepts no other class; a subclass must override `on_epoch_begin`."""

    def on_epoch_begin(self):
        raise NotImplementedError

    def on_epoch_end(self):
        pass


class CallbacksHandler:
    def __init__(self, train_loop):
        self.train_loop = train_loop
        self.callbacks = []

    def register_callbacks(self, callbacks):
        for callback in callbacks:
            assert isinstance(callback, AbstractCallback)
            assert callback.device_idx_execution is None
        self.callbacks += [callback.register_train_loop_object(self.train_loop) for callback in callbacks]
        self.callbacks.sort(key=lambda callback: callback.execution_order)

    def begin_epoch(self, epoch):
        self.train_loop.epoch = epoch
        for callback in self.callbacks:
            callback.on_epoch_begin()
            callback.on_epoch_end()


def train_loop(train=None, validation=None, test=None) -> SimpleNamespace:
    return SimpleNamespace(train_loader=train, validation_loader=validation, test_loader=test)


def samples(loader: DataLoader) -> list[int]:
    return torch.cat(list(loader)).tolist()


def test_every_given_loader_is_replaced_and_shuffled_as_before():
    loop = train_loop(train=DataLoader(SAMPLES, shuffle=True), test=DataLoader(SAMPLES))
    DDPHandler(loop).add_distributed_samplers(world_size=4, rank=1)
    for loader, shuffle in [(loop.train_loader, True), (loop.test_loader, False)]:
        sampler = loader.sampler
        assert isinstance(sampler, DistributedSampler)
        assert (sampler.dataset, sampler.num_replicas, sampler.rank, sampler.shuffle) == (SAMPLES, 4, 1, shuffle)
    assert loop.validation_loader is None


def test_all_arguments_of_a_loader_stay():
    options = {"batch_size": 3, "collate_fn": list, "pin_memory": True, "pin_memory_device": "cuda", "drop_last": True}
    options |= {"num_workers": 2, "worker_init_fn": print, "prefetch_factor": 5, "persistent_workers": True}
    options |= {"multiprocessing_context": multiprocessing.get_context("spawn"), "generator": torch.Generator()}
    options |= {"timeout": 7.0, "in_order": False}
    loader, _ = DDPHandler.build_loader_sampler(DataLoader(SAMPLES, **options), shuffle=False, world_size=2, rank=0)
    assert loader.dataset is SAMPLES
    assert {name: getattr(loader, name) for name in COPIED} == options


def test_a_loader_without_batches_gives_single_samples_of_one_member():
    samples = DataLoader(SAMPLES, batch_size=None)
    loader, _ = DDPHandler.build_loader_sampler(samples, shuffle=False, world_size=2, rank=1)
    assert list(loader) == [1, 3, 5, 7, 9]


UNKNOWN = DataLoader(OfUnknownLength(), sampler=[0])
BATCHES = data.BatchSampler(data.SequentialSampler(SAMPLES), 2, drop_last=False)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Endless()), "expected a dataset with indices, .* the IterableDataset Endless, which no sampler"),
        (UNKNOWN, "expected a dataset with a length, .* got OfUnknownLength without __len__"),
        (DataLoader(SAMPLES, batch_sampler=BATCHES), "expected a batch_size, got the batch_sampler BatchSampler; pass"),
    ],
)
def test_a_loader_that_cannot_be_split_is_refused_with_the_reason(loader, why):
    first = DataLoader(SAMPLES)
    loop = train_loop(train=first, test=loader)
    with pytest.raises(ConfigurationError, check=says(why)):
        DDPHandler(loop).add_distributed_samplers(2, 0)
    assert loop.train_loader is first


def test_the_epoch_is_set_by_hand_where_there_are_no_callbacks():
    loop = train_loop(train=DataLoader(SAMPLES, shuffle=True), validation=DataLoader(SAMPLES))
    handler = DDPHandler(loop)
    handler.add_distributed_samplers(2, 0)
    first = samples(loop.train_loader)
    handler.set_epoch(1)
    assert samples(loop.train_loader) != first
    assert loop.train_loader.sampler.epoch == loop.validation_loader.sampler.epoch == 1


def test_loaders_split_again_are_shuffled_as_before_and_get_the_epoch_once():
    loop = train_loop(train=DataLoader(SAMPLES, shuffle=True), test=DataLoader(SAMPLES))
    loop.callbacks_handler = CallbacksHandler(loop)
    handler = DDPHandler(loop)
    handler.add_distributed_samplers(4, 3)
    handler.add_distributed_samplers(2, 1)
    loop.callbacks_handler.begin_epoch(4)
    assert len(loop.callbacks_handler.callbacks) == 1
    assert [loader.sampler.shuffle for loader in (loop.train_loader, loop.test_loader)] == [True, False]
    assert [loader.sampler.epoch for loader in (loop.train_loader, loop.test_loader)] == [4, 4]
    assert loop.train_loader.sampler.num_replicas == 2


def test_a_sampler_that_is_dropped_is_warned_of():
    loop = train_loop(train=DataLoader(SAMPLES, sampler=data.WeightedRandomSampler([1.0] * 10, 5)))
    with pytest.warns(UserWarning, match="train_loader: expected a sequential or random sampler, got Weighted") as log:
        DDPHandler(loop).add_distributed_samplers(2, 0)
    assert log[0].filename == __file__
    assert not loop.train_loader.sampler.shuffle


def test_an_elastic_job_splits_among_the_present_ranks():
    master = MemoryMaster()
    connections = in_threads([lambda n=n: master.connect(n, 3, min_members=1) for n in range(3)])
    connections.pop(1).close()

    def split(connection):
        loop = train_loop(train=DataLoader(SAMPLES, batch_size=5))
        handler = DDPHandler(loop, connection=connection)
        ranks = handler.mp_sync(connection.rank).tolist()
        handler.add_distributed_samplers()
        return ranks, samples(loop.train_loader)

    results = in_threads([lambda one=one: split(one) for one in connections])
    assert results == [([0, 2], [0, 2, 4, 6, 8]), ([0, 2], [1, 3, 5, 7, 9])]
