"""The announcement of rank 0's server in torch's store, which torchrun keeps for the processes that it starts."""

import itertools
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed

from client.launch import own_server
from client.launch.launchers import StoreAddress
from client.launch.own_server import Announcement, StoreEntry
from statsd_bn.errors import ProtocolError, ServerUnreachable
from support.memory_members import wait_until
from support.sentences import says

ANNOUNCED = Announcement("tcp://127.0.0.1:5555", 3)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(own_server, "_stores", {})
    tcp_store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(tcp_store.port))
    yield tcp_store
    own_server._stores.clear()


@pytest.fixture
def entry_of(store, monkeypatch):
    address = StoreAddress("127.0.0.1", store.port)
    counts = {}

    def run(rank, life="life 0", timeout=20.0):
        monkeypatch.setattr(own_server, "_entries", counts.setdefault(rank, itertools.count()))
        return StoreEntry(address, rank, 2, life, timeout)

    return run


def test_the_others_read_what_rank_0_writes(entry_of):
    entry_of(0).write(ANNOUNCED)
    assert entry_of(1).read() == ANNOUNCED


def test_a_rank_that_connects_again_reads_the_next_announcement(entry_of):
    other = Announcement("tcp://127.0.0.1:5556")
    entry_of(0).write(ANNOUNCED)
    entry_of(0).write(other)
    assert [entry_of(1).read(), entry_of(1).read()] == [ANNOUNCED, other]


def test_restarted_processes_do_not_read_the_previous_announcement(entry_of):
    entry_of(0).write(ANNOUNCED)
    with pytest.raises(ServerUnreachable, check=says(r"to announce a server in the store at 127.0.0.1:\d+: check")):
        entry_of(1, life="life 1", timeout=0.1).read()


def test_a_known_announcement_is_ignored(entry_of):
    writing, reading = entry_of(0), entry_of(1)
    writing.write(ANNOUNCED)
    with pytest.raises(ServerUnreachable):
        reading.read(ANNOUNCED, 0.1)
    writing.write(Announcement(problem="none"))
    assert reading.read(ANNOUNCED, 20.0).problem == "none"


def test_a_long_wait_is_logged(entry_of, monkeypatch, caplog):
    monkeypatch.setattr(own_server, "WARN_SECONDS", 0.05)
    monkeypatch.setattr(own_server, "PAUSE_SECONDS", 0.01)
    began = time.time()
    with ThreadPoolExecutor(1) as executor, caplog.at_level("WARNING", "statsd_bn.client"):
        reading = executor.submit(entry_of(1).read)
        wait_until(lambda: len(caplog.records) >= 3)
        entry_of(0).write(ANNOUNCED)
        assert reading.result(20.0) == ANNOUNCED
    first, _, third, *_ = caplog.records
    assert re.match(r"waited \d+ s for rank 0 to announce a server in the store at 127.0.0.1:", first.getMessage())
    assert third.created - began >= 4 * 0.05, "each warning comes after twice the time of the one before"


def test_a_closed_store_ends_the_wait(entry_of):
    reading = entry_of(1)
    reading._store = _Gone()
    expected = says(r"rendezvous store at MASTER_ADDR 127.0.0.1, .*: connection closed$")
    with pytest.raises(ServerUnreachable, check=expected):
        reading.read()
    with pytest.raises(ServerUnreachable, match=r"connection closed$"):
        reading.write(ANNOUNCED)


class _Gone:
    def check(self, *_):
        raise distributed.DistNetworkError("connection closed\nframe #0: somewhere")

    set = check


def test_a_store_whose_process_is_frozen_ends_the_wait_in_time(entry_of, monkeypatch):
    monkeypatch.setattr(own_server, "ANSWER_SECONDS", 0.1)
    reading = entry_of(1, timeout=0.1)
    reading._store = frozen = _Frozen()
    try:
        with pytest.raises(ServerUnreachable, match="does not answer; its process may be frozen"):
            reading.read()
    finally:
        frozen.thaw.set()


class _Frozen:
    def __init__(self):
        self.thaw = threading.Event()

    def check(self, _):
        self.thaw.wait(20)
        return False


def test_a_store_that_accepts_but_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(own_server, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = StoreAddress("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(ServerUnreachable, check=says(r"rendezvous store at MASTER_ADDR 127.0.0.1, .*: ")):
            StoreEntry(address, 1, 2, "life 0", 0.3)


def test_without_a_store_its_address_is_named(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    expected = says(r"rendezvous store at MASTER_ADDR 127.0.0.1, MASTER_PORT 1, .*: ")
    with pytest.raises(ServerUnreachable, check=expected) as caught:
        StoreEntry(StoreAddress("127.0.0.1", 1), 1, 2, "life 0", 0.3)
    assert "frame #" not in str(caught.value)


def test_a_torch_without_stores_asks_for_an_endpoint(entry_of, monkeypatch):
    monkeypatch.setattr(distributed, "is_available", lambda: False)
    with pytest.raises(own_server.ConfigurationError, match="endpoint: expected one"):
        entry_of(0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"key": "sesame"}', '["a", 0, "", "sesame"]', "[" * 100_000),
        *('[1, 0, ""]', '["a", true, ""]', '["a", "1", ""]', '["a", 0, null]'),
    ],
    ids=lambda text: text[:20],
)
def test_anything_but_an_announcement_is_refused_and_not_quoted(text):
    with pytest.raises(ProtocolError, match="expected the announcement of rank 0") as caught:
        Announcement.parse(text.encode())
    assert "sesame" not in str(caught.value)


def test_an_announcement_is_made_printable():
    announcement = Announcement.parse(json.dumps(["tcp://\x1b[2J", 0, "two\nlines\x1b[2J"]).encode())
    assert (announcement.endpoint, announcement.problem) == (r"tcp://\x1b[2J", "two\nlines" + r"\x1b[2J")
