"""torch's process group in place of a launcher: which source wins, and where the processes meet."""

import itertools

import pytest
from torch import distributed

from client.launch import own_server, server_process
from client.launch.launchers import ProcessGroup
from client.launch.own_server import Rendezvous
from client.launch.settings import resolve
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from support.memory_members import in_threads, outcome
from support.sentences import says

GROUP = ProcessGroup(1, 4)
STORE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", **STORE}


def who(environ, **arguments):
    found = resolve(environ, GROUP, **arguments)
    return tuple((found.resolved[name].value, found.source(name)) for name in ("rank", "world_size"))


def test_without_other_settings_the_process_group_gives_the_identity():
    for environ in ({}, STORE):
        assert who(environ) == ((1, "process group"), (4, "process group"))
        found = resolve(environ, GROUP)
        assert found.uses_process_group
        assert found.store is None


def test_a_launcher_wins_over_the_process_group_and_keeps_its_store():
    assert who(TORCHRUN) == ((1, "RANK"), (4, "WORLD_SIZE"))
    for arguments in ({}, {"rank": 1, "world_size": 4}):
        found = resolve(TORCHRUN, GROUP, **arguments)
        assert found.store == ("node1", 29500)
        assert not found.uses_process_group


def test_arguments_win_over_the_process_group():
    assert who({}, rank=0, world_size=2) == ((0, "argument"), (2, "argument"))
    assert not resolve({}, GROUP, rank=0, world_size=2).uses_process_group, "the job has other processes"
    assert resolve({}, GROUP, rank=1, world_size=4).uses_process_group, "Lightning passes rank and world_size"


def test_a_launcher_of_one_process_does_not_hide_started_processes():
    srun = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    for environ in ({"RANK": "0", "WORLD_SIZE": "1", **STORE}, srun):
        assert who(environ) == ((1, "process group"), (4, "process group"))
        assert resolve(environ, GROUP).uses_process_group


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"RANK": "2", "WORLD_SIZE": "4"},
            r"^rank: expected the same .*, got 2 \(RANK\) and 1; pass rank and world_size$",
        ),
        ({"RANK": "2"}, r"^rank: expected the same .*, got 2 \(RANK\) and 1"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, r"^world_size: expected the same .*, got 2 \(WORLD_SIZE\) and 4"),
    ],
)
def test_a_launcher_that_contradicts_the_process_group_is_an_error(environ, message):
    with pytest.raises(ConfigurationError, check=says(message)):
        resolve(environ, GROUP)
    assert resolve(environ, GROUP, rank=1, world_size=4).source("rank") == "argument"


def test_with_an_endpoint_no_server_is_looked_for():
    assert not resolve({}, GROUP, endpoint="tcp://a:1").uses_process_group
    assert not resolve({"STATSD_BN_ENDPOINT": "tcp://a:1"}, GROUP).uses_process_group


@pytest.mark.parametrize(
    ("environ", "arguments", "is_alone"),
    [
        ({}, {}, True),
        (STORE, {}, True),
        ({"RANK": "0", "WORLD_SIZE": "1", **STORE}, {}, True),
        ({}, {"world_size": 1, "job": "mine"}, True),
        ({}, {"endpoint": "tcp://a:1"}, False),
        ({}, {"rank": 0, "world_size": 2}, False),
        ({}, {"policy": "elastic"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, False),
    ],
)
def test_without_a_size_or_a_server_a_process_is_alone(environ, arguments, is_alone):
    assert resolve(environ, **arguments).is_alone is is_alone
    assert resolve({}, ProcessGroup(0, 1)).is_alone
    assert not resolve({}, GROUP).is_alone


@pytest.fixture
def meet(monkeypatch):
    """Returns a function that runs a rank of a process group of two for each given host; the ranks find a server."""
    monkeypatch.setattr(own_server, "_entries", itertools.repeat(0))

    def run(*hosts, environ=None, **arguments):
        store = distributed.HashStore()
        monkeypatch.setattr(own_server, "process_group_store", lambda: store)

        def join(rank):
            settings = resolve({}, ProcessGroup(rank, 2), round_timeout=20.0, **arguments)
            return Rendezvous(settings, environ or {}, lambda *found: found).join()

        monkeypatch.setattr(own_server.StoreEntry, "_host", lambda entry: hosts[entry._rank])
        return in_threads([lambda rank=rank: outcome(lambda: join(rank)) for rank in range(len(hosts))])

    yield run
    for master in list(server_process._started):
        master.stop()


def test_on_one_host_the_server_of_rank_0_is_private_and_has_no_keys(meet):
    first, second = meet("a", "a")
    assert first[0].startswith("ipc://")
    assert second[:2] == (first[0], None)
    assert (first[2].rank, second[2].rank) == (0, 1)


def test_on_several_hosts_every_rank_gets_an_error_without_a_secret(meet):
    for error in meet("a", "b"):
        assert isinstance(error, ConfigurationError)
        assert "several nodes" in str(error)


def test_on_several_hosts_with_a_secret_the_server_has_keys(meet):
    environ = {"STATSD_BN_SECRET": "0123456789abcdef" * 2, "MASTER_ADDR": "127.0.0.1"}
    first, second = meet("a", "b", environ=environ)
    assert first[0].startswith("tcp://127.0.0.1:")
    assert first[1] == second[1] is not None


def test_a_missing_rank_is_named(meet):
    (error,) = meet("a", join_timeout=0.1)
    assert isinstance(error, ServerUnreachable)
    assert "for rank 1 to call client.connect() in the store of the process group" in error.message
