"""Ranks under a default job name check that they belong to one run."""

import threading
import time

import pytest
from torch.distributed import HashStore

import client
from client.launch import connect, launchers
from client.launch.launchers import ARGUMENT, DEFAULT, ProcessGroup, Setting
from client.session.current import current_connection
from server.cli.status import ask
from statsd_bn.errors import ConfigurationError
from support.memory_members import outcome, run_members

DEFAULT_NAME = Setting("job", "default", DEFAULT)


class Frozen:
    """A store of a stopped process."""

    def compare_set(self, *_):
        time.sleep(0.5)


class Forgetful:
    """A custom store without compare_set."""

    def compare_set(self, *_):
        raise NotImplementedError


@pytest.fixture
def meet(monkeypatch):
    """The outcome of two ranks, each in a process group with the given store."""
    here = threading.local()
    monkeypatch.setattr(launchers, "find_process_group", lambda: here.group)
    monkeypatch.setattr(connect, "process_group_store", lambda: here.store)

    def run(*stores, job=DEFAULT_NAME, size=2):
        def member(connection):
            here.store = stores[connection.rank]
            # Ranks in torch may be others.
            here.group = here.store and ProcessGroup(len(stores) - 1 - connection.rank, size)
            return outcome(lambda: connect.check_same_run(connection, job))

        return run_members(len(stores), member)

    return run


def test_ranks_of_two_runs_are_asked_to_choose_names(meet):
    found = meet(HashStore(), HashStore(), job=DEFAULT_NAME)
    assert [type(error) for error in found] == [ConfigurationError] * 2
    assert f"job '{DEFAULT_NAME.value}': expected the ranks of one run, got rank 1 of another one" in str(found[0])


def test_ranks_of_one_run_may_connect_any_number_of_times(meet):
    store = HashStore()
    assert [meet(store, store) for _ in range(2)] == [[None, None]] * 2


@pytest.mark.parametrize(
    "job", [Setting("job", "mine", ARGUMENT), Setting("job", "none", ARGUMENT), Setting("job", "7f", "SLURM_JOB_ID")]
)
def test_a_name_that_was_chosen_is_believed(meet, job):
    assert meet(HashStore(), HashStore(), job=job) == [None, None]


def test_without_a_process_group_of_all_ranks_nothing_is_compared(meet):
    assert meet(None, None) == [None, None]
    assert meet(HashStore(), HashStore(), size=3) == [None, None]


def test_a_rank_without_a_process_group_delays_no_other(meet):
    store = HashStore()
    assert meet(None, store, store) == [None] * 3


def test_a_frozen_store_delays_no_rank(meet, monkeypatch):
    monkeypatch.setattr(connect, "ANSWER_SECONDS", 0.05)
    assert meet(Frozen(), Frozen()) == [None, None]


def test_connect_raises_it_and_leaves_the_job(server, monkeypatch):
    def refuse(*_):
        raise ConfigurationError("of another run")

    monkeypatch.setattr(connect, "check_same_run", refuse)
    with pytest.raises(ConfigurationError, match="of another run"):
        client.connect(server.endpoint, rank=0, world_size=1)
    assert ask(server.endpoint)["groups"] == []
    assert current_connection() is None


def test_a_store_without_compare_delays_no_rank(meet):
    assert meet(HashStore(), Forgetful()) == [None, None]
