"""The seed library's interface: the server's master, its slaves' pipes, and `client.comm` between replicas."""

import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import client
import client.batchnorm
import client.comm
import client.replicate
import server
from statsd_bn import Rows, StatsdBNError
from support import contract_seed as seed
from support.starter import STARTER


@pytest.fixture(scope="module")
def rank_1():
    """A process that plays rank 1."""
    with ProcessPoolExecutor(1, mp_context=STARTER) as executor:
        yield executor


def exchange_as_two(endpoint, job, rank_1):
    """What both ranks receive when they run a forward and a backward round without a layer."""
    there = rank_1.submit(seed.as_rank, endpoint, job, 1, seed.exchange_by_hand)
    here = seed.as_rank(endpoint, job, 0, seed.exchange_by_hand)
    return here, there.result(seed.WAIT_SECONDS)


def assert_is_the_sum(received, rows):
    assert received.values == np.concatenate(rows).sum(0).tobytes()
    assert (received.count, received.replicas, received.members) == (10, 3, (0, 1))


@pytest.mark.processes
def test_two_pipes_get_the_sums_of_both_forward_and_backward(rank_1):
    with seed.server_on_a_socket() as running:
        here, there = exchange_as_two(running.endpoint, "by hand", rank_1)
    assert here == there
    forward, backward = here
    assert_is_the_sum(forward, seed.FORWARD)
    assert_is_the_sum(backward, seed.BACKWARD)
    assert (forward.key[-1], backward.key[-1]) == ("forward", "backward")


class Watched:
    """The master that a server makes for a group, with its calls recorded."""

    def __init__(self, monkeypatch):
        self.endpoint = ""
        self.masters, self.nr_slaves, self.rounds, self.put = [], [], [], []
        self._wrap(monkeypatch, server.SyncMaster, "register_slave", self._registered)
        self._wrap(monkeypatch, server.SyncMaster, "contribute", self._contributed)
        self._wrap(monkeypatch, server.FutureResult, "put", self.put.append)

    @staticmethod
    def _wrap(monkeypatch, owner, name, then):
        original = getattr(owner, name)

        def wrapped(self, *arguments):
            result = original(self, *arguments)
            then(self)
            return result

        monkeypatch.setattr(owner, name, wrapped)

    def _registered(self, master):
        self.masters.append(master)
        self.nr_slaves.append(master.nr_slaves)

    def _contributed(self, master):
        self.rounds += [one for one in master.open_rounds.values() if one not in self.rounds]


@pytest.fixture
def watched(monkeypatch):
    """A `server.Service` in a thread of this process, with recorded masters."""
    found = Watched(monkeypatch)
    quota = replace(server.Config().quota, silence_seconds=seed.SILENCE_SECONDS)
    with (
        seed.private_folder() as folder,
        server.Service(server.Config((f"ipc://{folder}/server",), quota=quota)) as service,
    ):
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        try:
            found.endpoint = service.endpoints[0]
            yield found
        finally:
            service.stop()
            thread.join(seed.WAIT_SECONDS)


@pytest.mark.processes
def test_the_server_registers_each_rank_as_a_slave_of_one_master(watched, rank_1):
    exchange_as_two(watched.endpoint, "registered", rank_1)
    assert sorted(watched.nr_slaves) == [1, 2]
    assert len({id(master) for master in watched.masters}) == 1


@pytest.mark.processes
def test_a_round_has_a_future_for_each_slave_which_run_master_reduces(watched, rank_1):
    (forward, backward), _ = exchange_as_two(watched.endpoint, "reduced", rank_1)
    assert len(watched.put) == 4
    assert all(isinstance(future, server.FutureResult) and future.done for future in watched.put)
    assert [seed.Received.of(server.SyncMaster.run_master(round_)) for round_ in watched.rounds] == [forward, backward]


def test_a_future_holds_the_first_contribution_and_refuses_another():
    future, rows = server.FutureResult(), Rows(seed.COUNTS[0], seed.FORWARD[0])
    assert not future.done
    with pytest.raises(LookupError):
        future.get()
    assert future.put(rows, b"peer")
    assert future.put(Rows(seed.COUNTS[0], seed.FORWARD[0].copy()), b"peer again")
    assert not future.put(Rows(seed.COUNTS[0], seed.BACKWARD[0]), b"peer")
    assert future.done
    assert future.get() is rows


def test_run_master_serves_until_sigterm():
    with seed.private_folder() as folder:
        program = f"import server; server.run_master(server.Config(('ipc://{folder}/server',), log_level='error'))"
        with seed.serving([sys.executable, "-c", program]) as running:
            assert running.endpoint == f"ipc://{folder}/server"
            assert (folder / "server").is_socket()
            assert running.terminate() == 0


def test_a_sync_master_answers_replicas_and_gradients_flow_through_it():
    model = client.DataParallelWithCallback(seed.Total(), seed.REPLICAS)
    x = torch.arange(6.0).view(6, 1).requires_grad_()
    output = model(x)
    assert output.tolist() == [[15.0]] * 6
    (output * torch.arange(6.0).view(6, 1)).sum().backward()
    assert x.grad.tolist() == [[15.0]] * 6
    assert model.module.master.nr_slaves == 2


def test_a_sync_master_gets_the_messages_its_own_first_and_gives_each_slave_its_answer():
    seen = []

    def answer(messages):
        seen.extend(messages)
        return [(who, f"to {who}") for who, _ in messages]

    master = client.comm.SyncMaster(answer)
    assert master.nr_slaves == 0
    pipes = [master.register_slave(name) for name in ("b", "a")]
    assert (master.nr_slaves, [pipe.identifier for pipe in pipes]) == (2, ["b", "a"])
    assert all(isinstance(pipe, client.comm.SlavePipe) for pipe in pipes)
    answers = {}

    def slave(pipe):
        answers[pipe.identifier] = pipe.run_slave(f"from {pipe.identifier}")

    threads = [threading.Thread(target=slave, args=(pipe,), daemon=True) for pipe in pipes]
    for thread in threads:
        thread.start()
    assert master.run_master("from master") == "to 0"
    for thread in threads:
        thread.join(seed.WAIT_SECONDS)
    assert seen == [(0, "from master"), ("b", "from b"), ("a", "from a")]
    assert answers == {"b": "to b", "a": "to a"}


class Failing(seed.Total):
    """The last replica raises instead of sending its message."""

    def forward(self, x):
        if self.pipe is not None and self.pipe.identifier == 2:
            raise MemoryError("no room")
        return super().forward(x)


def test_a_slave_that_raises_ends_the_wait_of_all_others():
    with pytest.raises((MemoryError, StatsdBNError), match="no room"):
        client.DataParallelWithCallback(Failing(), seed.REPLICAS)(torch.ones(3, 1))


def test_a_future_of_comm_hands_one_result_from_one_thread_to_another():
    future, found = client.comm.FutureResult(), []
    thread = threading.Thread(target=lambda: found.append(future.get()), daemon=True)
    thread.start()
    future.put("result")
    thread.join(seed.WAIT_SECONDS)
    assert found == ["result"]


BATCHNORM = ("SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d", "convert_model")
PATCHES = ("patch_sync_batchnorm", "set_sbn_eps_mode")
CALLBACKS = ("CallbackContext", "execute_replication_callbacks", "patch_replication_callback")


@pytest.mark.parametrize(
    ("module", "names"),
    [(client.batchnorm, (*BATCHNORM, *PATCHES)), (client.replicate, ("DataParallelWithCallback", *CALLBACKS))],
    ids=["batchnorm", "replicate"],
)
def test_a_module_of_the_seed_has_its_names_which_are_the_clients(module, names):
    for name in names:
        assert getattr(module, name) is getattr(client, name), name
