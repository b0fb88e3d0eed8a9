"""Warnings about layers that train alone although the job has other processes."""

import pytest
import torch

import client
from client.nn import unsynchronized
from client.session import connection as current
from client.transports.process_group import NamedProcessGroup
from statsd_bn import endpoints
from support.memory_members import run_members

X = torch.arange(12.0).reshape(4, 3)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(current, "_current", None)
    monkeypatch.setattr(unsynchronized, "_warned_of", [])
    unsynchronized._world_size_of_launcher.cache_clear()


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", "statsd_bn.client")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "statsd_bn.client"]


def layer(name: str = "bn1", group: client.Group | str | None = None) -> client.SynchronizedBatchNorm1d:
    made = client.SynchronizedBatchNorm1d(3, group=group)
    made.layer_name = name
    return made


def test_an_unconnected_process_of_several_is_warned_once(monkeypatch, warnings):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("bn1", "bn1", "bn2"):
        layer(name)(X)
    (text,) = warnings()
    assert "WORLD_SIZE is 4" in text
    assert "layer 'bn1' is not synchronised; call client.connect()" in text


@pytest.mark.parametrize("world_size", [None, "1", "many", ""])
def test_a_single_process_is_not_warned(monkeypatch, warnings, world_size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    layer()(X)
    assert warnings() == []


def test_evaluation_and_replicas_in_one_process_need_no_connection(monkeypatch, warnings):
    monkeypatch.setenv("WORLD_SIZE", "4")
    layer().eval()(X)
    client.DataParallelWithCallback(layer(), device_ids=["cpu"] * 2)(X)
    assert warnings() == []


def test_a_formerly_connected_process_is_not_warned(monkeypatch, warnings, server, job):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with client.connect(server.endpoint, job=job, rank=0, world_size=1):
        pass
    layer()(X)
    assert warnings() == []


@pytest.fixture
def process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def initialise(size=3):
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: size)

    return initialise


def test_an_unconnected_process_of_a_process_group_is_warned(process_group, warnings):
    """No variables are set, as under mp.spawn. The layer's `client.Group` is not a process group of torch."""
    bn = layer(group=client.Group("left", 2))
    bn(X)
    assert warnings() == [], "there are no others yet"
    process_group()
    for _ in range(2):
        bn(X)
    (text,) = warnings()
    assert "torch's process group has 3 ranks, and this process is not connected: layer 'bn1' " in text


def test_a_layer_over_a_process_group_of_one_is_not_warned(monkeypatch, warnings):
    monkeypatch.setenv("WORLD_SIZE", "4")
    bn = layer()
    bn.group = NamedProcessGroup("7", 1)
    bn(X)
    assert warnings() == []


def test_the_only_process_of_a_process_group_is_not_warned(process_group, warnings):
    process_group(1)
    layer(group=client.Group("left", 2))(X)
    assert warnings() == []


def test_a_process_connected_before_its_process_group_is_warned(process_group, warnings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(endpoints, "RUNTIME_FOLDERS", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    bn = layer(group="local")
    with client.connect():
        bn(X)
        assert warnings() == []
        process_group()
        bn(X)
    (text,) = warnings()
    assert "client.connect() found no other process" in text
    assert "call it after init_process_group()" in text


def test_a_compiled_layer_warns_too(monkeypatch, warnings):
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch.compile(layer(), backend="eager", fullgraph=True)(X)
    (text,) = warnings()
    assert "WORLD_SIZE is 4" in text


def test_a_member_that_closes_without_a_round_is_warned(warnings):
    run_members(2, lambda _: None)
    assert len(warnings()) == 2
    assert all(
        "no layer was synchronised before the connection closed; check that client.convert_model() was called" in text
        for text in warnings()
    )


@pytest.mark.parametrize(
    "program",
    [
        lambda connection: connection.all_gather("hello", b""),
        lambda connection: connection.close("ValueError: bad data"),
    ],
    ids=["a round", "a failure"],
)
def test_a_member_with_a_round_or_an_error_is_not_warned(warnings, program):
    run_members(2, program)
    assert warnings() == []
