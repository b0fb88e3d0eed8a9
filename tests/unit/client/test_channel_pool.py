"""Channel pools lend each channel to one thread at a time, and never again after an error."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from client.session.channel_pool import Channel, ChannelPool, ZmqChannelPool
from statsd_bn.errors import ConnectionClosed
from support.memory_members import INTERRUPTED_SECONDS, MemoryChannelPool, interrupted, outcome, wait_until


class Recording(ChannelPool):
    """A channel pool that records whether its channels were closed."""

    def __init__(self) -> None:
        super().__init__("recording://")
        self.opened = []

    def _open(self):
        channel = type("Recorded", (Channel,), {"closed": False, "close": lambda self: setattr(self, "closed", True)})()
        self.opened.append(channel)
        return channel


def test_a_channel_that_saw_an_error_is_closed_and_not_lent_again():
    """A late answer may still arrive on it."""
    channel_pool = Recording()
    with pytest.raises(ZeroDivisionError), channel_pool.channel() as first:
        raise ZeroDivisionError
    assert first.closed
    with channel_pool.channel() as second:
        assert second is not first


def test_closing_closes_the_idle_channels():
    channel_pool = Recording()
    with channel_pool.channel() as channel:
        pass
    channel_pool.close()
    assert channel.closed


def test_idle_channels_can_be_closed_while_one_is_lent():
    channel_pool = Recording()
    with channel_pool.channel() as lent:
        with channel_pool.channel() as idle:
            pass
        channel_pool.close_idle()
        assert (lent.closed, idle.closed) == (False, True)
    with channel_pool.channel() as again:
        assert again is lent


@pytest.fixture
def echo(tmp_path):
    endpoint = f"ipc://{tmp_path}/echo"
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)

    def serve():
        try:
            while True:
                router.send_multipart(router.recv_multipart())
        except zmq.ContextTerminated:
            router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    yield endpoint
    context.term()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_closing_wakes_a_thread_that_waits(echo):
    channel_pool = ZmqChannelPool(echo)
    results = []

    def wait():
        with channel_pool.channel() as channel:
            results.append("waiting")
            channel.receive(60.0)

    thread = threading.Thread(target=lambda: results.append(outcome(wait)))
    thread.start()
    wait_until(lambda: bool(results))
    channel_pool.close()
    thread.join(timeout=10)
    assert isinstance(results[1], ConnectionClosed)


def test_closing_wakes_a_thread_that_reads_connection_events(tmp_path, monkeypatch):
    channel_pool = ZmqChannelPool(f"ipc://{tmp_path}/nobody")

    def close_first(socket):
        channel_pool.close()
        return recv_monitor_message(socket)

    def wait():
        with channel_pool.channel() as channel:
            monkeypatch.setattr(channel._monitor, "poll", lambda _: True)
            channel.receive(60.0)

    monkeypatch.setattr("client.session.channel_pool.CLOSE_SECONDS", 0.1)  # how long close() waits for a lent channel
    monkeypatch.setattr("client.session.channel_pool.recv_monitor_message", close_first)
    assert isinstance(outcome(wait), ConnectionClosed)


def test_a_closed_pool_opens_no_channel(tmp_path):
    channel_pool = ZmqChannelPool(f"ipc://{tmp_path}/nobody")
    channel_pool.close()
    with pytest.raises(ConnectionClosed), channel_pool.channel():
        pass


def test_a_pool_that_is_being_closed_opens_no_channel(tmp_path, monkeypatch):
    monkeypatch.setattr("client.session.channel_pool.CLOSE_SECONDS", 0.1)
    channel_pool = ZmqChannelPool(f"ipc://{tmp_path}/nobody")

    def open_late():
        with channel_pool.channel():
            channel_pool.close()
            with channel_pool.channel():
                pass

    assert isinstance(outcome(open_late), ConnectionClosed)


def test_sending_to_a_master_that_is_long_away_does_not_block(tmp_path):
    channel_pool = ZmqChannelPool(f"ipc://{tmp_path}/nobody")

    def ask_again_and_again():
        with channel_pool.channel() as channel:
            for _ in range(3000):
                channel.send(b"is anybody there?")

    with ThreadPoolExecutor(1) as executor:
        asking = executor.submit(ask_again_and_again)
        try:
            asking.result(timeout=10)
        finally:
            channel_pool.close()


def test_frames_in_memory_reach_their_receivers():
    channel_pool = MemoryChannelPool(lambda peer, frame: [(peer, frame + b"!"), (b"nobody", b"lost")])
    with channel_pool.channel() as one, channel_pool.channel() as other:
        one.send(b"one")
        assert one.receive(1.0) == b"one!"
        assert other.receive(0.0) is None


def test_a_signal_does_not_make_a_wait_endless():
    channel_pool = MemoryChannelPool(lambda peer, _: [(peer, b"came after all")])
    with channel_pool.channel() as channel, interrupted(lambda: channel.send(b"")):
        assert channel.receive(INTERRUPTED_SECONDS) is None


def test_threads_that_open_channels_at_the_same_time_get_their_own_answers(monkeypatch):
    monkeypatch.setattr(queue, "Queue", _slow_to_make(queue.Queue))
    channel_pool = MemoryChannelPool(lambda peer, frame: [(peer, frame)])
    together = threading.Barrier(4)

    def echo(number: int) -> bytes | None:
        together.wait(60.0)
        with channel_pool.channel() as channel:
            together.wait(60.0)
            channel.send(bytes([number]))
            return channel.receive(1.0)

    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(echo, range(4))) == [bytes([number]) for number in range(4)]


def _slow_to_make(kind: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        threading.Event().wait(0.05)
        return kind()

    return make


def test_a_wait_ends_early_when_the_master_has_come_back(tmp_path):
    """Messages to the former master are lost, so the member must ask again."""
    endpoint = f"ipc://{tmp_path}/master"
    channel_pool = ZmqChannelPool(endpoint)
    with zmq.Context() as context, channel_pool.channel() as channel:
        with context.socket(zmq.ROUTER) as master:
            master.bind(endpoint)
            channel.send(b"question")
            assert master.recv_multipart()[1] == b"question"
            assert channel.receive(0.5) is None
        with context.socket(zmq.ROUTER) as another, ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(channel.receive, 60.0)
            another.bind(endpoint)
            assert waiting.result(timeout=20) is None
    channel_pool.close()


def test_closing_does_not_wait_for_a_zeromq_that_is_stuck(server, monkeypatch):
    channel_pool = ZmqChannelPool(server.endpoint)
    release = threading.Event()
    term = channel_pool._context.term

    def stuck():
        release.wait(10.0)
        term()

    monkeypatch.setattr(channel_pool._context, "term", stuck)
    monkeypatch.setattr("client.session.channel_pool.CLOSE_SECONDS", 0.1)
    channel_pool.close()
    assert not channel_pool._context.closed
    release.set()
    wait_until(lambda: channel_pool._context.closed)


def test_a_jobs_own_server_without_its_folder_is_gone_and_a_shared_one_is_not(tmp_path):
    folder, other = tmp_path / "statsd_bn-job-7f", tmp_path / "sockets"
    own, shared = (ZmqChannelPool(f"ipc://{each}/server") for each in (folder, other))
    try:
        assert (own.is_gone, shared.is_gone) == (True, False)
        folder.mkdir()
        assert not own.is_gone
    finally:
        own.close()
        shared.close()
