"""client.comm: values that a user's module exchanges between the replicas of a process."""

import copy
import pickle
from queue import Full

import pytest
import torch

import client
from client.comm import FutureResult
from statsd_bn.errors import ReplicaLost, RoundMismatch, RoundTimeout
from support.contract_seed import REPLICAS, Total, to_all
from support.memory_members import INTERRUPTED_SECONDS, interrupted


def test_each_replica_gets_its_answer_in_each_pass():
    model = client.DataParallelWithCallback(Total(), REPLICAS)
    for size in (6, 3):
        assert model(torch.ones(size, 1)).tolist() == [[float(size)]] * size


def test_each_replica_gets_its_own_answer():
    class Numbered(Total):
        def answer(self, messages):
            return [(0, 10.0), *((who, 10.0 + who) for who, _ in reversed(messages[1:]))]

    model = client.DataParallelWithCallback(Numbered(), REPLICAS)
    assert model(torch.ones(3, 1)).tolist() == [[10.0], [11.0], [12.0]]


def test_a_module_may_exchange_twice_in_a_pass():
    class Twice(Total):
        def forward(self, x):
            return super().forward(super().forward(x))

    model = client.DataParallelWithCallback(Twice(), REPLICAS)
    assert model(torch.ones(3, 1)).tolist() == [[9.0]] * 3


def test_a_pass_without_an_exchange_leaves_nothing_behind():
    class Idle(Total):
        def forward(self, x):
            return super().forward(x) if self.training else x

    model = client.DataParallelWithCallback(Idle(), REPLICAS)
    for is_training in (False, False, True, False, True):
        model.train(is_training)
        assert model(torch.ones(3, 1)).sum() == (9 if is_training else 3)
    assert model.module.master.nr_slaves == 2


def test_a_batch_that_feeds_one_replica_has_no_slaves():
    model = client.DataParallelWithCallback(Total(), REPLICAS)
    model(torch.ones(3, 1))
    assert model(torch.ones(1, 1)).tolist() == [[1.0]]
    assert model.module.master.nr_slaves == 0


def test_a_replica_that_does_not_participate_is_named():
    class Absent(Total):
        def forward(self, x):
            return x if self.pipe is not None and self.pipe.identifier == 2 else super().forward(x)

    with pytest.raises(RoundMismatch, match=r"replica 0 waits at SyncMaster \d+; .*replica 2 has finished"):
        client.DataParallelWithCallback(Absent(), REPLICAS)(torch.ones(3, 1))


def test_a_callback_that_fails_is_the_error_of_the_pass():
    class Wrong(Total):
        def answer(self, messages):
            return to_all(1.0, messages)[1:]

    expected = r"master_callback: expected an answer for each of \[0, 1, 2\], 0 first, got \[1, 2\]"
    with pytest.raises((ValueError, ReplicaLost), match=expected):
        client.DataParallelWithCallback(Wrong(), REPLICAS)(torch.ones(3, 1))


def test_only_some_of_the_replicas_may_exchange():
    class First(Total):
        def __data_parallel_replicate__(self, ctx, copy_id):
            self.is_in = copy_id < 2
            if self.is_in:
                super().__data_parallel_replicate__(ctx, copy_id)

        def forward(self, x):
            return super().forward(x) if self.is_in else x

    assert client.DataParallelWithCallback(First(), REPLICAS)(torch.ones(3, 1)).tolist() == [[2.0], [2.0], [1.0]]


def test_copies_and_pickles_of_a_module_include_its_master():
    model = Total()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert other.master is not model.master
        assert client.DataParallelWithCallback(other, REPLICAS)(torch.ones(3, 1)).tolist() == [[3.0]] * 3


def test_a_signal_does_not_make_the_wait_for_a_result_endless():
    future = FutureResult()
    with interrupted(lambda: future.put("came after all")), pytest.raises(RoundTimeout):
        future.get(timeout=INTERRUPTED_SECONDS)


def test_a_future_is_put_and_taken_in_turn():
    future = FutureResult()
    future.put(None)
    with pytest.raises(Full, match="before the previous result was read"):
        future.put(2)
    assert future.get() is None
    with pytest.raises(RoundTimeout, match="no result came within 0 s"):
        future.get(timeout=0)
