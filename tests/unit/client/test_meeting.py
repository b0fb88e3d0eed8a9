"""The meeting: what member 0 tells, through a store as torchrun keeps it for the processes that it starts."""

import itertools
import json
import socket
import threading

import pytest
from torch import distributed

from client.launch import store as meeting_store
from client.launch.launchers import StoreAddress
from client.launch.store import Meeting, News
from statsd_bn.errors import ProtocolError, ServerUnreachable

NEWS = News("tcp://127.0.0.1:5555", 3, "sesame", "")


@pytest.fixture
def store(monkeypatch):
    """The store of a launcher: for its processes there is one already."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(meeting_store, "_stores", {})
    yield distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting_store._stores.clear()


@pytest.fixture
def meet(store, monkeypatch):
    """A process's meetings; each process counts its own."""
    place = StoreAddress("127.0.0.1", store.port)
    counts = {}

    def run(member, life="life 0", patience=20.0):
        monkeypatch.setattr(meeting_store, "_meetings", counts.setdefault(member, itertools.count()))
        return Meeting(place, member, 2, life, patience)

    return run


def test_what_member_0_tells_the_others_hear(meet):
    meet(0).tell(NEWS)
    assert meet(1).hear() == NEWS


def test_they_wait_for_it(meet):
    telling, hearing = meet(0), meet(1)
    later = threading.Timer(0.2, telling.tell, [NEWS])
    later.start()
    assert hearing.hear() == NEWS
    later.join()


def test_whoever_meets_again_hears_of_the_next_master(meet):
    other = News("tcp://127.0.0.1:5556")
    meet(0).tell(NEWS)
    meet(0).tell(other)
    assert [meet(1).hear(), meet(1).hear()] == [NEWS, other]


def test_those_that_are_started_anew_do_not_hear_of_the_master_before(meet):
    meet(0).tell(NEWS)
    with pytest.raises(ServerUnreachable, match=r"has told nobody of a master, in the store at 127.0.0.1:\d+"):
        meet(1, life="life 1", patience=0.1).hear()


def test_what_is_known_is_no_news(meet):
    telling, hearing = meet(0), meet(1)
    telling.tell(NEWS)
    with pytest.raises(ServerUnreachable):
        hearing.hear(NEWS, 0.1)
    telling.tell(News(problem="none"))
    assert hearing.hear(NEWS, 20.0).problem == "none"


def test_a_long_wait_is_told(meet, monkeypatch, caplog):
    monkeypatch.setattr(meeting_store, "WARN_SECONDS", 0.05)
    monkeypatch.setattr(meeting_store, "PAUSE_SECONDS", 0.01)
    with pytest.raises(ServerUnreachable), caplog.at_level("WARNING", "statsd_bn.client"):
        meet(1, patience=0.6).hear()
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("waiting since 0 s for member 0 to start a master, at 127.0.0.1:")
    assert 2 <= len(told) <= 4, "in growing intervals"


def test_a_store_that_is_gone_ends_the_wait(meet):
    hearing = meet(1)
    hearing._store = _Gone()
    with pytest.raises(ServerUnreachable, match=r"rendezvous store at MASTER_ADDR 127.0.0.1, .*: connection closed$"):
        hearing.hear()
    with pytest.raises(ServerUnreachable, match=r"connection closed$"):
        hearing.tell(NEWS)


class _Gone:
    """A store whose process has ended, in torch's words."""

    def check(self, *_):
        raise distributed.DistNetworkError("connection closed\nframe #0: somewhere")

    set = check


def test_a_store_whose_process_is_frozen_ends_the_wait_in_time(meet, monkeypatch):
    monkeypatch.setattr(meeting_store, "ANSWER_SECONDS", 0.1)
    hearing = meet(1, patience=0.1)
    hearing._store = frozen = _Frozen()
    try:
        with pytest.raises(ServerUnreachable, match="does not answer; its process may be frozen"):
            hearing.hear()
    finally:
        frozen.thaw.set()


class _Frozen:
    """A store whose process is stopped: torch sends it a question, and waits."""

    def __init__(self):
        self.thaw = threading.Event()

    def check(self, _):
        self.thaw.wait(20)
        return False


def test_a_store_that_takes_connections_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(meeting_store, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = StoreAddress("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(ServerUnreachable, match=r"rendezvous store at MASTER_ADDR 127.0.0.1, .*: "):
            Meeting(place, 1, 2, "life 0", 0.3)


def test_without_a_store_the_place_is_named(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(
        ServerUnreachable, match=r"rendezvous store at MASTER_ADDR 127.0.0.1, MASTER_PORT 1, .*: "
    ) as caught:
        Meeting(StoreAddress("127.0.0.1", 1), 1, 2, "life 0", 0.3)
    assert "frame #" not in str(caught.value)


def test_a_torch_without_stores_asks_for_an_endpoint(meet, monkeypatch):
    monkeypatch.setattr(distributed, "is_available", lambda: False)
    with pytest.raises(meeting_store.ConfigurationError, match="endpoint: expected one"):
        meet(0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"endpoint": 1}', '{"epoch": true}', '{"epoch": "1"}', '{"key": "sesame"}'),
        '{"secret": null}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_news_is_refused_without_a_word_of_what_it_is(text):
    with pytest.raises(ProtocolError, match="expected the news of member 0") as caught:
        News.parse(text.encode())
    assert "sesame" not in str(caught.value)


def test_news_are_plain_whoever_has_told_them():
    told = News.parse(json.dumps({"endpoint": "tcp://\x1b[2J", "problem": "two\nlines\x1b[2J"}).encode())
    assert (told.endpoint, told.problem) == (r"tcp://\x1b[2J", "two\nlines" + r"\x1b[2J")


def test_news_do_not_show_the_secret():
    assert "sesame" not in repr(NEWS)
