"""Launchers: the identity of a process from the variables of torchrun, Kubeflow and SLURM."""

import pytest

from client.launch import launchers
from client.launch.launchers import StoreAddress
from client.launch.settings import resolve
from statsd_bn.errors import ConfigurationError
from support.sentences import says

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN |= {"TORCHELASTIC_RUN_ID": "run-7", "TORCHELASTIC_RESTART_COUNT": "2"}
# A PyTorchJob with a master and two workers, one process in each pod.
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456"}
KUBEFLOW |= {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1"}
# `srun --nodes 2 --ntasks 8` in a job of three nodes that was requeued once.
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "1"}
SLURM |= {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}
SLURM |= {"SLURM_NNODES": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[01-02]"}


@pytest.mark.parametrize(
    ("environ", "identity", "store"),
    [
        (TORCHRUN, (5, 8, "run-7", 2), StoreAddress("node1", 29500)),
        (KUBEFLOW, (1, 3, "default", 0), StoreAddress("digits-master-0", 23456)),
        (SLURM, (5, 8, "slurm-4711.3", 1), StoreAddress("node01", 15_000 + 4711 + 303)),
    ],
    ids=["torchrun", "kubeflow", "srun"],
)
def test_a_launcher_gives_identity_and_store(environ, identity, store):
    found = resolve(environ).member
    assert (found.rank, found.world_size, found.job, found.epoch) == identity
    assert launchers.store_address(environ).value == store


def test_rank_and_master_variables_win_over_slurms():
    found = resolve({**SLURM, **TORCHRUN, "RANK": "7", "TORCHELASTIC_RESTART_COUNT": "0"}).member
    assert (found.rank, found.world_size, found.job, found.epoch) == (7, 8, "run-7", 0)
    assert launchers.store_address({**SLURM, "MASTER_ADDR": "here"}).value == StoreAddress("here", 15_000 + 4711 + 303)
    assert launchers.store_address({**SLURM, "MASTER_PORT": "1234"}).value == StoreAddress("node01", 1234)


def test_a_batch_script_is_no_task():
    script = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_RESTART_COUNT")}
    found = resolve({**script, "SLURM_PROCID": "0"}).member
    assert (found.rank, found.world_size, found.job, found.epoch) == (0, 1, "default", 0)
    assert launchers.store_address({**script, "SLURM_PROCID": "0"}) is None


def test_two_steps_of_one_slurm_job_are_two_jobs_with_different_ports():
    other = {**SLURM, "SLURM_STEP_ID": "4"}
    assert resolve(SLURM).member.job != resolve(other).member.job
    assert launchers.step_port(SLURM) != launchers.step_port(other)


@pytest.mark.parametrize("number", ["1", "15000", "67108863", "4294967290"])
def test_any_job_has_a_port_that_no_outgoing_connection_is_given(number):
    assert 15_000 <= launchers.step_port({**SLURM, "SLURM_JOB_ID": number, "SLURM_STEP_ID": number}) < 30_000


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        *(("node7", "node7"), ("a,b", "a"), ("node[01-04,07]", "node01"), ("node[007]", "node007")),
        *(("node[3,1-2],other", "node3"), ("rack[1-2]node[08-09]", "rack1node08"), ("login,node[1-2]", "login")),
        ("gpu[1-2]-ib.example.org,a", "gpu1-ib.example.org"),
    ],
)
def test_the_first_host_of_a_list(listed, first):
    assert launchers.first_host(listed) == first


@pytest.mark.parametrize("listed", [",a", "node[", "node[1", "node]", "node[a-b]", "node[1-2]]", "[", " ", "a b"])
def test_an_invalid_list_of_hosts_is_named(listed):
    with pytest.raises(
        ConfigurationError, check=says(r"SLURM_STEP_NODELIST: expected hosts such as .*set MASTER_ADDR")
    ):
        launchers.store_address({**SLURM, "SLURM_STEP_NODELIST": listed})


@pytest.mark.parametrize(
    ("environ", "evidence"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "2"}, "got 2, .* LOCAL_WORLD_SIZE=4"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "4"}, "got 3, .* PET_NNODES=3, PET_NPROC_PER_NODE=4"),
        ({**SLURM, "WORLD_SIZE": "3"}, "got 3, .* SLURM_NNODES=3, SLURM_STEP_NUM_TASKS=8"),
        ({**SLURM, "WORLD_SIZE": "1", "SLURM_NNODES": "1"}, "got 1, .* SLURM_NNODES=1, SLURM_STEP_NUM_TASKS=8"),
    ],
)
def test_a_world_size_that_counts_nodes_is_reported(environ, evidence):
    with pytest.raises(ConfigurationError, check=says(r"WORLD_SIZE: .*counts nodes: .*torchrun")) as caught:
        resolve(environ)
    assert says(evidence)(caught.value)
    assert resolve(environ, world_size=8, rank=0).member.world_size == 8


@pytest.mark.parametrize(
    "environ",
    [
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"},
        {**TORCHRUN, **KUBEFLOW, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"},
        {**KUBEFLOW, "PET_NPROC_PER_NODE": "4", "LOCAL_RANK": "0"},
        {**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"},
        {**KUBEFLOW, "PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "4"},
        {**SLURM, "WORLD_SIZE": "8"},
        # One task per node, each a torchrun with four processes.
        {**SLURM, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "2"},
        # Tasks that train alone, by explicit settings and by torchrun.
        {**SLURM, "SLURM_NNODES": "1", "RANK": "0", "WORLD_SIZE": "1"},
        {**SLURM, **TORCHRUN, "SLURM_NNODES": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_a_world_size_that_counts_processes_is_accepted(environ):
    assert resolve(environ).member.world_size == int(environ["WORLD_SIZE"])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, True),
        ({"LOCAL_WORLD_SIZE": "2"}, False),
        ({}, False),
        (SLURM, False),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, True),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "", "SLURM_NNODES": "1"}, True),
        ({**SLURM, "LOCAL_WORLD_SIZE": "2", "SLURM_STEP_NUM_NODES": "1"}, False),
    ],
)
def test_whether_all_processes_are_on_one_node(environ, expected):
    assert launchers.is_one_node(environ, StoreAddress("node1", 29500), 4) is expected


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_processes_that_meet_on_loopback_are_on_one_node(address):
    assert launchers.is_one_node({}, StoreAddress(address, 29500), 4)


def test_one_process_is_on_one_node():
    assert launchers.is_one_node({}, StoreAddress("node1", 29500), 1)


@pytest.mark.parametrize("address", ["node-1", "a_b.example.org", "192.0.2.1", "::1", "2001:db8::1"])
def test_processes_meet_at_a_name_or_an_address(address):
    assert launchers.store_address({"MASTER_ADDR": address, "MASTER_PORT": "1"}).value == StoreAddress(address, 1)


@pytest.mark.parametrize("rank", [{}, {"RANK": ""}])
def test_one_of_several_processes_needs_a_rank(rank):
    """Otherwise each process would be rank 0, start a server, and wait for the others there."""
    environ = {"WORLD_SIZE": "4", **rank}
    with pytest.raises(ConfigurationError, match=r"RANK: expected this process's rank, since WORLD_SIZE says 4"):
        resolve(environ)
    assert resolve(environ, rank=0).member.world_size == 4
    assert resolve({"WORLD_SIZE": "1", **rank}).member.rank == 0


def test_without_a_launcher_there_is_no_place_to_meet():
    assert launchers.store_address({}) is None
    assert launchers.store_address({"MASTER_ADDR": "a"}) is None
    assert launchers.store_address({"MASTER_PORT": "1"}) is None
    assert [setting({}) for setting in (launchers.rank, launchers.world_size, launchers.job)] == [None] * 3
    assert launchers.epoch({}) == launchers.Setting("epoch", 0, launchers.DEFAULT)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT: expected an integer, got 'x'"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT: expected a port from 1 to 65535, got 65536"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "0"}, "got 0"),
        ({"MASTER_ADDR": "a:29500", "MASTER_PORT": "1"}, "MASTER_ADDR: expected a host's name .*, got 'a:29500'"),
        ({"MASTER_ADDR": "tcp://a", "MASTER_PORT": "1"}, "got 'tcp://a'"),
        ({"MASTER_ADDR": "[::1]", "MASTER_PORT": "1"}, r"got '\[::1\]'"),
        ({**SLURM, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID: expected an integer, got 'x'"),
    ],
)
def test_a_wrong_variable_is_named(environ, message):
    with pytest.raises(ConfigurationError, match=message):
        launchers.store_address(environ)


@pytest.mark.parametrize("name", ["127.evil.example", "localhost.evil.example", "127.1.evil"])
def test_a_name_that_only_looks_like_loopback_is_not_taken_for_this_host(name):
    assert not launchers.is_one_node({"LOCAL_WORLD_SIZE": "1"}, StoreAddress(name, 1), 2)
