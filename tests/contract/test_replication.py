"""The replication callbacks: their order, their contexts, and the two ways to give them to a data-parallel model."""

import copy

import pytest
import torch
from torch import nn

import client

REPLICAS = ["cpu"] * 3


class Recorder(nn.Module):
    """Records its callbacks in a list that its copies share."""

    def __init__(self, calls):
        super().__init__()
        self.calls = [calls]

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.calls[0].append((ctx, copy_id))
        self.copy_id = copy_id

    def forward(self, x):
        return x + self.copy_id


@pytest.fixture
def calls():
    return []


def numbers(calls):
    return [copy_id for _, copy_id in calls]


def test_callbacks_come_copy_by_copy_the_master_first(calls):
    copies = [nn.Sequential(Recorder(calls), nn.ReLU(), Recorder(calls)) for _ in REPLICAS]
    client.execute_replication_callbacks(copies)
    assert numbers(calls) == [0, 0, 1, 1, 2, 2]


def test_the_copies_of_a_sub_module_share_a_context_on_which_they_hang_what_they_like(calls):
    copies = [nn.Sequential(Recorder(calls), Recorder(calls)) for _ in REPLICAS]
    client.execute_replication_callbacks(copies)
    contexts = [ctx for ctx, _ in calls]
    assert all(isinstance(ctx, client.CallbackContext) for ctx in contexts)
    assert contexts[::2] == [contexts[0]] * 3
    assert contexts[1::2] == [contexts[1]] * 3
    assert contexts[0] is not contexts[1]
    contexts[0].found = "set by copy 0"
    assert contexts[4].found == "set by copy 0"
    assert contexts[0].barrier is contexts[1].barrier


def test_data_parallel_with_callback_calls_the_copies_back_before_each_forward(calls):
    model = client.DataParallelWithCallback(nn.Sequential(Recorder(calls)), REPLICAS)
    assert isinstance(model, nn.DataParallel)
    for size, expected in ((6, [[0.0]] * 2 + [[1.0]] * 2 + [[2.0]] * 2), (2, [[0.0], [1.0]])):
        calls.clear()
        assert model(torch.zeros(size, 1)).tolist() == expected
        assert numbers(calls) == list(range(min(size, 3)))


def test_a_patched_data_parallel_calls_its_copies_back(calls):
    model = nn.DataParallel(nn.Sequential(Recorder(calls)))
    # Torch makes no replicas on the CPU.
    model.replicate = lambda module, devices: [copy.deepcopy(module) for _ in devices]
    client.patch_replication_callback(model)
    model.device_ids = REPLICAS
    replicas = model.replicate(model.module, REPLICAS)
    outputs = model.parallel_apply(replicas, [(torch.zeros(1),)] * 3, [{}] * 3)
    assert torch.cat(outputs).tolist() == [0.0, 1.0, 2.0]
    assert [replica[0].copy_id for replica in replicas] == [0, 1, 2]


def test_a_patched_data_parallel_synchronises_its_layers():
    torch.manual_seed(0)
    x = torch.randn(6, 2)
    model = nn.DataParallel(client.SynchronizedBatchNorm1d(2))
    model.replicate = lambda module, devices: [copy.deepcopy(module) for _ in devices]
    client.patch_replication_callback(model)
    model.device_ids = ["cpu"] * 2
    replicas = model.replicate(model.module, model.device_ids)
    outputs = model.parallel_apply(replicas, [(part,) for part in x.split(3)], [{}] * 2)
    torch.testing.assert_close(torch.cat(outputs), nn.BatchNorm1d(2)(x))


def test_only_a_data_parallel_can_be_patched():
    with pytest.raises(TypeError, match=r"expected an nn\.DataParallel, got Linear"):
        client.patch_replication_callback(nn.Linear(1, 1))


TWINS = {
    "BatchNorm1d": client.SynchronizedBatchNorm1d,
    "BatchNorm2d": client.SynchronizedBatchNorm2d,
    "BatchNorm3d": client.SynchronizedBatchNorm3d,
    "LazyBatchNorm1d": client.LazySynchronizedBatchNorm1d,
    "LazyBatchNorm2d": client.LazySynchronizedBatchNorm2d,
    "LazyBatchNorm3d": client.LazySynchronizedBatchNorm3d,
    "SyncBatchNorm": client.SynchronizedBatchNorm,
}


def test_while_torch_is_patched_its_batch_norms_make_synchronised_layers_and_then_its_own_again():
    before = {name: getattr(nn, name) for name in TWINS}
    with client.patch_sync_batchnorm():
        assert {name: getattr(nn, name) for name in TWINS} == TWINS
        assert type(nn.Sequential(nn.BatchNorm2d(3))[0]) is client.SynchronizedBatchNorm2d
    assert {name: getattr(nn, name) for name in TWINS} == before
    with pytest.raises(MemoryError), client.patch_sync_batchnorm():
        raise MemoryError
    assert {name: getattr(nn, name) for name in TWINS} == before
