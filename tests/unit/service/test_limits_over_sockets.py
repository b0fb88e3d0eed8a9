"""Limits of connections, over real sockets: each limit ends only the connection that exceeds it."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from client.session.protocol.member import Member
from client.transports.server import SlavePipe
from server import Service
from server.cli.status import ask
from server.network import connections, listener
from statsd_bn import limits
from statsd_bn.errors import LimitExceeded
from statsd_bn.messages import Heartbeat, Status, StatusRequest
from statsd_bn.wire import decode, encode
from support.memory_members import wait_until
from support.strategies import contribution, key, register, rows

WAIT_SECONDS = 30.0


@pytest.fixture
def dial() -> Iterator[Callable[[Service], zmq.Socket]]:
    with zmq.Context() as context, ExitStack() as stack:

        def connect(service: Service) -> zmq.Socket:
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.connect(service.endpoints[0])
            return dealer

        yield connect


def counter(service: Service, name: str) -> int:
    return ask(service.endpoints[0])[name]


def hangs_up(connection: socket.socket) -> float:
    started = time.monotonic()
    connection.settimeout(WAIT_SECONDS)
    while connection.recv(4096):
        pass
    return time.monotonic() - started


def test_a_connection_with_an_unfinished_handshake_is_closed(serve, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_MILLISECONDS", 500)
    service = serve()
    address = ("127.0.0.1", int(service.endpoints[0].rpartition(":")[2]))
    with socket.create_connection(address) as stranger:
        assert hangs_up(stranger) < 10.0
    wait_until(lambda: counter(service, "refused_connections") == 1)


def test_a_member_that_left_leaves_no_trace(serve):
    service = serve()
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    for _ in range(3):
        Connection(ZmqChannelPool(service.endpoints[0]), who).close()
    wait_until(lambda: not service._connections.members)


def test_clients_that_do_not_read_do_not_grow_the_servers_memory(serve, dial, caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL, "statsd_bn.server")  # pytest stores log records
    # Else the server would close a connection with so many refused messages.
    monkeypatch.setattr(connections, "MAX_REFUSALS", 2**20)
    monkeypatch.setattr(listener, "SEND_HIGH_WATER_MARK", 2)
    monkeypatch.setattr(listener, "RECEIVE_HIGH_WATER_MARK", 2)
    service = serve()
    stranger = dial(service)
    stranger.sndtimeo = int(WAIT_SECONDS * 1000)
    long = "n" * limits.MAX_NAME_BYTES
    frame = encode(contribution(0, key=key(long, job=long, group=long)))

    def refused(frames: int) -> int:
        count = counter(service, "strangers")
        for _ in range(frames):
            stranger.send(frame)
        wait_until(lambda: counter(service, "strangers") == count + frames, WAIT_SECONDS)
        return _resident_bytes()

    before = refused(10_000)  # fills the queues and the network, and the allocator gets its pages
    dropped = counter(service, "dropped_answers")
    after = refused(12_000)
    assert counter(service, "dropped_answers") - dropped > 4_000
    assert after - before < 2**23


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_connection_with_too_many_refusals_gets_an_error_and_ends(serve, dial, monkeypatch):
    monkeypatch.setattr(connections, "MAX_REFUSALS", 5)
    service = serve()
    stranger = dial(service)
    with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        for _ in range(100):
            stranger.send(encode(contribution(0)))
        assert monitor.poll(WAIT_SECONDS * 1000), "not ended"
        stranger.disable_monitor()
    codes = [decode(stranger.recv()).code]
    while stranger.poll(0):
        codes.append(decode(stranger.recv()).code)
    assert set(codes) == {"unknown_session", "limit"}
    assert codes.index("limit") > 5
    report = ask(service.endpoints[0])
    assert report["flooding_connections"] == codes.count("limit")
    assert report["strangers"] == codes.count("unknown_session") < 100


def test_refusals_are_forgotten_after_a_moment(serve, dial, monkeypatch):
    monkeypatch.setattr(connections, "MAX_REFUSALS", 5)
    service, refused = serve(), 0
    stranger = dial(service)
    while refused < 20:
        stranger.send(encode(contribution(0)))
        assert stranger.poll(WAIT_SECONDS * 1000)
        assert decode(stranger.recv()).code == "unknown_session"
        refused += 1
        if refused % 5 == 0:
            wait_until(lambda: not service._connections._refusals)
    assert counter(service, "flooding_connections") == 0


def test_a_member_may_be_refused_once_for_each_group_after_a_restart(serve, dial):
    service = serve()
    member = dial(service)
    member.send(encode(register(0, 1)))
    for number in range(1000):
        member.send(encode(Heartbeat(number.to_bytes(limits.TOKEN_BYTES))))
    member.send(encode(StatusRequest()))
    answers: list[Any] = []
    while not isinstance(answers and answers[-1], Status):
        assert member.poll(WAIT_SECONDS * 1000)
        answers.append(decode(member.recv()))
    assert answers[-1].report["flooding_connections"] == 0


def test_a_client_learns_of_a_limit_by_an_error(serve):
    service = serve(max_tenant_bytes=20_000)
    who = Member("job", "world", 0, 0, 1, 20.0, "here")
    with Connection(ZmqChannelPool(service.endpoints[0]), who) as member:
        with pytest.raises(LimitExceeded, match="exceed the limit of 20000") as caught:
            SlavePipe(member, "bn").run_slave(rows(1.0, channels=4096))
        assert caught.value.fields["limit"] == 20_000
    assert counter(service, "over_limits") == 1
