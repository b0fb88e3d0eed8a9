"""Joining without an endpoint: where the server listens, who learns its endpoint, and errors without a server."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from torch import distributed

from client.launch import own_server, server_process
from client.launch.launchers import StoreAddress
from client.launch.own_server import (
    Announcement,
    Rendezvous,
    StoreEntry,
    bind_endpoint,
    open_connection,
    public_endpoint,
)
from client.launch.settings import resolve
from programs.other_user import NOBODY, as_another_user, needs_another_user
from server.__main__ import main
from statsd_bn.endpoints import check_folder
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, GroupIncomplete, ServerUnreachable
from support.launched import PROC, Launched, free_port
from support.memory_members import in_threads, outcome
from support.paths import TESTS
from support.sentences import says

PROGRAMS = TESTS / "programs" / "launch_programs.py"

with_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")
with_proc = pytest.mark.skipif(not (PROC / "self/environ").exists(), reason="finds processes by /proc")


def resolves(name):
    try:
        return bool(socket.gethostbyname(name))
    except OSError:
        return False


SECRET = "0123456789abcdef" * 2

# Variables that claim several nodes, although all processes are on this one.
NODES = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": socket.gethostname()}
SEVERAL_NODES = {**NODES, "STATSD_BN_SECRET": SECRET}

by_name = pytest.mark.skipif(not resolves(socket.gethostname()), reason="this host does not know its own name")


@pytest.fixture
def launch(tmp_path):
    """Starts the processes of a job like a launcher without a store, and kills the remaining ones."""
    with ExitStack() as stack:

        def run(program, processes, **environ):
            common = {
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port("")),
                **environ,
            }
            command = [sys.executable, PROGRAMS, program]
            return [
                stack.enter_context(Launched(command, {**common, "RANK": str(rank)}, tmp_path / f"errors-{rank}"))
                for rank in range(processes)
            ]

        yield run


@pytest.fixture
def environ(monkeypatch):
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(own_server, "_stores", {})
    # Each thread plays a process, but they would share this counter.
    monkeypatch.setattr(own_server, "_entries", itertools.repeat(0))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in ({"TORCHELASTIC_USE_AGENT_STORE": "True"} | address).items():
        monkeypatch.setenv(name, value)
    yield {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **address}
    for master in list(server_process._started):
        master.stop()
    own_server._stores.clear()


def join(environ, rank, join_at=lambda *found: found, **given):
    environ = {**environ, "RANK": str(rank)}
    settings = resolve(environ, **{"round_timeout": 20.0, **given})
    return Rendezvous(settings, environ, join_at).join()


@pytest.mark.long
@by_name
@with_proc
def test_processes_meet_repeatedly_and_share_the_store_with_a_process_group(launch):
    """Without torchrun: member 0 has the store. The launcher claims several nodes, so there are keys."""
    run = launch("meet_twice", 2, **SEVERAL_NODES)
    first, second = run[0].line("covers 2"), run[0].line("covers 2")
    assert f" to tcp://{socket.gethostname()}:" in first
    assert first != second, "the second time there is another server"
    for process in run:
        process.line("through")
        assert process.end() == 0, process.errors
        assert process.leaves_nothing()


@with_proc
@pytest.mark.parametrize(
    "program", ["go_on_after_member_0", pytest.param("go_on_after_member_0_in_forked_children", marks=pytest.mark.long)]
)
def test_member_0_stays_at_its_end_until_the_others_have_ended(launch, program):
    first, second = launch(program, 2)
    first.line("at the end")
    with pytest.raises(subprocess.TimeoutExpired):
        first.process.wait(1.0)
    second.write_line("go on")
    second.line("covers 1")
    assert (first.end(), second.end()) == (0, 0)
    assert first.leaves_nothing()


@with_proc
@pytest.mark.long
def test_a_member_that_was_busy_when_its_server_ended_does_not_wait_for_another_server(launch):
    first, second = launch("be_busy_when_member_0_ends", 2)
    for process in (first, second):
        process.line("covers 2")
    first.process.send_signal(signal.SIGKILL)
    assert first.leaves_nothing()
    second.write_line("go on")
    assert "rank 0" in second.line("ReplicaLost")
    assert second.end() == 0


def test_on_one_node_the_server_listens_in_a_private_folder_without_keys(environ):
    endpoint, keys, who = join(environ, 0)
    folder = Path(endpoint.removeprefix("ipc://")).parent
    check_folder(folder)
    assert (keys, who.rank) == (None, 0)
    assert join(environ, 1)[:2] == (endpoint, None)


STRANGER = """
import client
from client.launch import own_server
from client.launch.launchers import StoreAddress
from client.launch.own_server import StoreEntry
from server.cli.status import ask
from statsd_bn.errors import StatsdBNError
be_another_user()
address = StoreAddress("127.0.0.1", int(os.environ["MASTER_PORT"]))
endpoint = StoreEntry(address, 1, 2, "job default/latest life", 20.0).read().endpoint
own_server._entries = iter([0])
for look in (lambda: ask(endpoint), lambda: client.connect(endpoint, rank=1, world_size=2), client.connect):
    try:
        print("IN", look())
    except StatsdBNError as error:
        print(type(error).__name__, error.message)
"""


@pytest.mark.long
@needs_another_user
@with_proc
def test_another_user_cannot_find_or_join_the_server_that_member_0_has_started(launch):
    """The socket's path is public: every user that can connect to the store can read it. Its folder is private."""
    port = str(free_port(""))
    first, second = launch("go_on_after_member_0", 2, MASTER_PORT=port)
    first.line("at the end")
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    lines = as_another_user(STRANGER, known)
    assert len(lines) == 3
    for line in lines:
        assert re.match(rf"ServerUnreachable this user \(uid {NOBODY}\) cannot open ipc://.*: Permission denied", line)
    second.write_line("go on")
    second.line("covers 1")
    assert (first.end(), second.end()) == (0, 0)


def announced(environ, endpoint: str) -> dict[str, str]:
    """Announce a server in the store, as any user that can connect to the store can."""
    address = StoreAddress(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    StoreEntry(address, 0, 2, "job default/latest life", 20.0).write(Announcement(endpoint))
    return environ


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_server_in_a_folder_that_others_can_write_to_is_not_joined(environ, tmp_path, mode):
    tmp_path.chmod(mode)
    problem = rf"expected a socket in a folder that other users cannot write to, got {tmp_path}"
    with pytest.raises(ConfigurationError, check=says(problem)):
        join(announced(environ, f"ipc://{tmp_path}/server"), 1, open_connection)


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("tcp://192.0.2.1:1", r"MASTER_ADDR: expected the same on all processes; .*//192.0.2.1:1"),
        ("ipc:///nowhere/statsd_bn-job-a/server", "are they in different containers"),
    ],
)
def test_a_server_on_another_node_or_in_an_invisible_folder_is_an_error_with_a_remedy(environ, endpoint, problem):
    with pytest.raises(ConfigurationError, check=says(problem)):
        join(announced(environ, endpoint), 1)


@by_name
@with_curve
@pytest.mark.parametrize("way", ["file", "variable"])
def test_on_several_nodes_all_have_the_keys_and_the_epoch_of_member_0(environ, tmp_path, way):
    """torchrun counts restarts on each node separately (pytorch#135712)."""
    assert main(["secret", str(tmp_path / "job.secret")]) == 0
    ways = {"file": {"STATSD_BN_SECRET_FILE": str(tmp_path / "job.secret")}, "variable": {"STATSD_BN_SECRET": SECRET}}
    environ |= {**NODES, **ways[way]}
    endpoint, keys, _ = join({**environ, "TORCHELASTIC_RESTART_COUNT": "3"}, 0)
    other, same_keys, who = join({**environ, "TORCHELASTIC_RESTART_COUNT": "1"}, 1)
    assert endpoint.startswith(f"tcp://{socket.gethostname()}:")
    assert (other, same_keys, who.epoch) == (endpoint, keys, 3)
    assert keys is not None
    entry = next(iter(own_server._stores.values())).get("statsd_bn/job default/latest life/0").decode()
    assert not [key for key in (SECRET, keys.pair.secret, keys.server) if key in entry]


@pytest.mark.parametrize("rank", [0, 1])
def test_on_several_nodes_without_a_secret_every_process_gets_the_remedies_at_once(environ, rank):
    with pytest.raises(
        ConfigurationError,
        check=says(r"may be on several nodes .*=127.*LOCAL_WORLD_SIZE.*STATSD_BN_SECRET_FILE.*--curve"),
    ) as caught:
        join({**environ, **NODES, "MASTER_PORT": "1"}, rank)
    assert "python -m server secret FILE" in str(caught.value)


def test_two_jobs_with_one_store_have_a_server_each(environ):
    endpoints = {job: join(environ, 0, job=job)[0] for job in ("left", "right")}
    assert endpoints["left"] != endpoints["right"]
    for job, endpoint in endpoints.items():
        assert join(environ, 1, job=job)[0] == endpoint


def test_different_values_of_master_addr_are_an_error(environ):
    """Some launchers give MASTER_ADDR=localhost to rank 0 and its host name to the others."""
    del environ["LOCAL_WORLD_SIZE"]
    join(environ, 0)
    address = StoreAddress(socket.gethostname(), int(environ["MASTER_PORT"]))
    # Use the same store under the host's name, which may not resolve to the store's address.
    own_server._stores[os.getpid(), address] = own_server._stores[os.getpid(), address._replace(host="127.0.0.1")]
    with pytest.raises(ConfigurationError, check=says(r"MASTER_ADDR: expected the same on all .* at ipc://\S+\. Give")):
        join({**environ, "MASTER_ADDR": address.host, "STATSD_BN_SECRET": SECRET}, 1)


def test_restarted_processes_of_one_node_ignore_the_former_server(environ):
    join({**environ, "TORCHELASTIC_RESTART_COUNT": "0"}, 0)
    restarted = {**environ, "TORCHELASTIC_RESTART_COUNT": "1"}
    with pytest.raises(ServerUnreachable, match="for rank 0 to announce a server"):
        join(restarted, 1, join_timeout=0.1)
    endpoint, _, _ = join(restarted, 0)
    own_server._stores.clear()
    assert join(restarted, 1)[0] == endpoint


def test_a_server_that_does_not_start_is_an_error_on_all_ranks(environ, monkeypatch):
    monkeypatch.setenv("STATSD_BN_LOG_LEVEL", "loud")
    errors = in_threads([lambda rank=rank: outcome(lambda: join(environ, rank)) for rank in range(2)])
    assert all(isinstance(error, ServerUnreachable) for error in errors)
    assert "exited with code 2" in str(errors[0])
    assert "rank 0 could not start a server: " in str(errors[1])
    assert "exited with code 2" in str(errors[1])


def test_a_folder_open_to_others_is_an_error_on_all_ranks(environ, monkeypatch):
    """As on file systems without modes."""

    def refuse(folder):
        raise ConfigurationError(f"expected the folder {folder} to be closed to other users")

    monkeypatch.setattr(server_process, "make_private_folder", refuse)
    errors = in_threads([lambda rank=rank: outcome(lambda: join(environ, rank)) for rank in range(2)])
    assert isinstance(errors[0], ConfigurationError)
    assert isinstance(errors[1], ServerUnreachable)
    assert "rank 0 could not start a server: " in str(errors[1])
    assert "to be closed to other users" in str(errors[1])


def test_a_member_0_that_cannot_join_stops_its_server(environ):
    started = []

    def refuse(*_):
        started.extend(server_process._started)
        raise ServerUnreachable("refused")

    with pytest.raises(ServerUnreachable, match="refused"):
        join(environ, 0, refuse)
    (master,) = started
    assert master._process.wait(20) == 0


def test_a_member_0_that_times_out_leaves_its_server_to_the_others(environ):
    def give_up(*_):
        raise GroupIncomplete("member 2 did not connect")

    with pytest.raises(GroupIncomplete):
        join(environ, 0, give_up)
    (master,) = server_process._started
    assert master._process.poll() is None


@by_name
@with_curve
@pytest.mark.parametrize("refusal", [ServerUnreachable, AuthenticationRefused])
def test_the_server_of_an_earlier_epoch_is_not_used(environ, refusal, caplog):
    environ |= SEVERAL_NODES
    member_0 = StoreEntry(
        StoreAddress(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])), 0, 2, "job default/latest life", 20.0
    )
    member_0.write(Announcement("tcp://old:1", 1))
    endpoints = []

    def join_at(endpoint, _, who):
        endpoints.append(endpoint)
        if endpoint == "tcp://old:1":
            member_0.write(Announcement("tcp://new:1", 2))
            raise refusal("it is gone")
        return who.epoch

    assert join(environ, 1, join_at) == 2
    assert endpoints == ["tcp://old:1", "tcp://new:1"]
    assert "it is gone; waiting in case rank 0 was restarted" in caplog.text


@by_name
@with_curve
def test_an_unreachable_server_is_an_error_if_no_other_server_is_announced(environ, monkeypatch):
    monkeypatch.setattr(own_server, "RESTART_SECONDS", 0.1)
    environ |= {**NODES, "STATSD_BN_SECRET": SECRET}
    address = StoreAddress(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    StoreEntry(address, 0, 2, "job default/latest life", 20.0).write(Announcement("tcp://behind-a-wall:1"))

    def join_at(*_):
        raise ServerUnreachable("a wall")

    with pytest.raises(ServerUnreachable, match=r"^a wall\. Do all processes have the same STATSD_BN_SECRET\?$"):
        join(environ, 1, join_at)


def test_a_server_listens_on_the_address_that_others_reach(monkeypatch):
    here = {"192.0.2.1", "2001:db8::1", "127.0.1.1"}
    known = {"here": "192.0.2.1", "elsewhere": "192.0.2.2", "this-host": "127.0.1.1"}

    def look_up(name, _, family, *rest):
        if name[0].isalpha() and name not in known:
            raise socket.gaierror
        return getaddrinfo(known.get(name, name), None, family, *rest)

    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(own_server, "_is_local", lambda _, address: address in here)
    assert bind_endpoint("here") == bind_endpoint("192.0.2.1") == "tcp://192.0.2.1:*"
    for name in ("elsewhere", "192.0.2.2", "this-host", "nobody-knows"):
        assert bind_endpoint(name) == "tcp://0.0.0.0:*"
    assert bind_endpoint("2001:db8::1") == "tcp://[2001:db8::1]:*"
    assert bind_endpoint("2001:db8::2") == "tcp://[::]:*"


def test_an_address_of_this_host_is_recognised():
    assert own_server._is_local(socket.AF_INET, "127.0.0.1")
    assert not own_server._is_local(socket.AF_INET, "192.0.2.1"), "an address for documentation (RFC 5737)"


def test_the_endpoint_has_the_launchers_name_and_the_servers_port():
    assert public_endpoint("node1", "tcp://192.0.2.1:4711") == "tcp://node1:4711"
    assert public_endpoint("2001:db8::1", "tcp://[2001:db8::1]:4711") == "tcp://[2001:db8::1]:4711"


def test_an_invalid_name_is_no_name_of_this_host():
    assert bind_endpoint("a..b") == "tcp://0.0.0.0:*"
