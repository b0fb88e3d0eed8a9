"""A connection of a single process: no server is needed, and every method works."""

import logging
import socket
import subprocess
import sys
import tempfile
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

import client
from client.launch import connect
from client.session.connection import latest_connection
from client.transports.choose import communicator_for
from statsd_bn import endpoints
from statsd_bn.errors import ConfigurationError, ServerUnreachable


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "STATSD_BN_ENDPOINT", "STATSD_BN_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(endpoints, "RUNTIME_FOLDERS", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Loop:
    train_loader = DataLoader(torch.arange(6.0), batch_size=2)
    validation_loader = test_loader = None


def test_every_method_of_a_connection_works_alone():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    model, plain = client.convert_model(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    with client.connect() as connection:
        assert (connection.rank, connection.rank_and_size, connection.members) == (0, (0, 1), [0])
        assert (connection.endpoint, connection.is_in_process) == ("in process", True)
        assert connection.group("local").size == 1
        data = bytes(range(256)) * 9000
        assert connection.all_gather("data", data) == {0: data}
        for _ in range(2):
            with client.join(model):
                model(x).square().sum().backward()
            plain(x).square().sum().backward()
            before = [parameter.grad / 8 for parameter in model.parameters()]
            assert client.average_gradients(model, 8) == 8
            assert all(torch.equal(old, new.grad) for old, new in zip(before, model.parameters(), strict=True))
        handler = client.DDPHandler(Loop())
        handler.add_distributed_samplers()
        assert handler.mp_sync(2.5, return_tensor=False) == [2.5]
        for found, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            assert torch.equal(found, expected)
        client.recalibrate(model, [x, x])
        with pytest.raises(ConfigurationError, match="expected at most the 1 members"):
            connection.group(client.Group("pair", 2))
    assert "in process: job 'default', rank 0 of 1, closed" in repr(connection)


def test_a_member_that_rejoins_after_a_pause_begins_a_new_step():
    with client.connect() as connection:
        steps = [connection.first_step]
        for _ in range(2):
            connection.pause(None)
            connection.rejoin(None)
            steps.append(connection.first_step)
            connection.pause(None)
            assert connection.all_gather("data", b"x") == {0: b"x"}, "a gather ends the pause"
        assert steps == sorted(set(steps))


def test_a_process_alone_logs_its_identity_once(caplog):
    caplog.set_level("INFO", "statsd_bn.client")
    client.connect(job="digits").close()
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert "no launcher or process group names other ranks: training alone, without a server" in messages
    assert messages[-1] == "connected: job 'digits', rank 0 of 1, in process"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("STATSD_BN_ENDPIONT", "STATSD_BN_ENDPOINT"), ("STATSD_BN_JOBS", "STATSD_BN_JOB"), ("STATSD_BN_MAX_GROUPS", "")],
)
def test_a_misspelt_variable_is_warned_of_and_a_variable_of_the_server_is_not(monkeypatch, caplog, name, hint):
    monkeypatch.setenv(name, "4")
    client.connect().close()
    messages = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert messages == ([f"unknown environment variable {name} is ignored; did you mean {hint}?"] if hint else [])


def test_a_server_of_this_user_that_is_running_is_used(serve, tmp_path):
    endpoint = endpoints.default_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)})
    (tmp_path / "statsd_bn").mkdir(mode=0o700)
    serve(endpoint)
    with client.connect() as connection:
        assert (connection.endpoint, connection.is_in_process) == (endpoint, False)


def test_a_socket_that_a_killed_server_has_left_behind_is_no_server(tmp_path):
    (tmp_path / "statsd_bn").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "statsd_bn" / "server"))
    with client.connect() as connection:
        assert connection.is_in_process


@pytest.mark.parametrize("given", [None, "ipc:///nowhere/b"])
def test_an_error_names_the_variable_that_gave_the_endpoint(monkeypatch, given):
    monkeypatch.setenv("STATSD_BN_ENDPOINT", "ipc:///nowhere/a")
    monkeypatch.setattr(connect, "open_connection", mock.Mock(side_effect=ServerUnreachable("no server")))
    with pytest.raises(ServerUnreachable) as caught:
        client.connect(given, rank=0, world_size=2)
    notes = getattr(caught.value, "__notes__", [])
    assert ("The endpoint came from STATSD_BN_ENDPOINT." in notes) == (given is None)


def test_more_than_one_process_without_a_server_stays_an_error(monkeypatch):
    monkeypatch.setattr(connect, "FIND_SECONDS", 0.0)
    with pytest.raises(ServerUnreachable, match="no server of this user"):
        client.connect(rank=0, world_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ServerUnreachable, match="no server of this user"):
        client.connect()


def test_a_child_of_multiprocessing_without_other_ranks_is_warned(monkeypatch, caplog):
    monkeypatch.setattr("multiprocessing.parent_process", object)
    monkeypatch.setattr("client.launch.connect.Finalize", lambda *_, **__: None)
    client.connect().close()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "call client.connect() after torch.distributed.init_process_group()" in record.getMessage()


# Prints whether the compiler is imported: after connect() in a process alone, then before connect() opens a connection.
LOADED = """
import sys
import client
from client.launch import connect
def is_loaded(*_):
    print("torch._dynamo" in sys.modules)
    raise SystemExit
client.connect().close()
print("torch._dynamo" in sys.modules)
connect._open = is_loaded
client.connect("ipc:///nowhere", rank=0, world_size=2)
"""


@pytest.mark.processes
def test_with_others_the_compiler_is_loaded_before_heartbeats_begin():
    """The import holds Python's lock for long; a process alone may never need the compiler."""
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.split() == ["False", "True"], ended.stderr


@pytest.mark.parametrize(("given", "is_alone"), [({"rank": 0, "world_size": 1}, True), ({}, False)])
def test_a_connection_declared_alone_ignores_a_process_group(given, is_alone):
    with client.connect(**given):
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            assert (communicator_for(None) is None) == is_alone
            assert latest_connection().is_explicitly_alone == is_alone
        finally:
            distributed.destroy_process_group()
