"""The faults of the chaos tests' proxy, in front of an echo server."""

import random
import socket
import threading
import time

import pytest

from chaos.chaos_proxy import DIRECTIONS, DOWN, ENDS, FIN, RST, UP, Proxy
from support.memory_members import wait_until

SECONDS = 20.0

# Far longer than a busy machine may suspend the test.
STALL_SECONDS = 2.0


class Echo:
    """A TCP server that echoes, and records received bytes and the end of each connection."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.received = b""
        self.ends = []
        self.ended = threading.Semaphore(0)
        self.connections = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        with connection:
            try:
                while chunk := connection.recv(65536):
                    self.received += chunk
                    connection.sendall(chunk)
                self.ends.append(FIN)
            except OSError:
                self.ends.append(RST)
        self.ended.release()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def echo():
    found = Echo()
    yield found
    found.close()


@pytest.fixture
def proxy(echo):
    with Proxy(echo.endpoint, random.Random(0)) as found:
        yield found


@pytest.fixture
def connect(proxy):
    opened = []

    def open_one():
        host, _, port = proxy.endpoint.removeprefix("tcp://").rpartition(":")
        opened.append(socket.create_connection((host, int(port)), SECONDS))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


def receive(connection, n):
    """n bytes, or fewer at the end."""
    found = b""
    while len(found) < n and (chunk := connection.recv(n - len(found))):
        found += chunk
    return found


def end_of(connection):
    try:
        assert connection.recv(1) == b""
    except ConnectionResetError:
        return RST
    return FIN


@pytest.mark.parametrize("end", ENDS)
def test_a_cut_ends_all_connections_on_both_sides_and_new_ones_are_accepted(proxy, connect, echo, end):
    connections = [connect(), connect()]
    for connection in connections:
        connection.sendall(b"hello")
        assert receive(connection, 5) == b"hello"
    proxy.cut(end)
    assert [end_of(connection) for connection in connections] == [end, end]
    assert all(echo.ended.acquire(timeout=SECONDS) for _ in connections)
    assert echo.ends == [end, end]
    again = connect()
    again.sendall(b"again")
    assert receive(again, 5) == b"again"
    assert proxy.connections == 3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_stall_holds_back_one_direction_and_loses_nothing(proxy, connect, echo, direction):
    connection = connect()
    connection.sendall(b"before")
    assert receive(connection, 6) == b"before"
    started = time.monotonic()
    proxy.stall(STALL_SECONDS, direction)
    connection.sendall(b"after")
    if direction != UP:
        wait_until(lambda: echo.received == b"beforeafter")
    connection.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    assert echo.received == (b"before" if direction == UP else b"beforeafter")
    connection.settimeout(SECONDS)
    assert receive(connection, 5) == b"after"
    assert time.monotonic() - started >= STALL_SECONDS


@pytest.mark.parametrize("end", ENDS)
def test_a_halved_chunk_arrives_in_part_and_its_connection_ends(proxy, connect, echo, end):
    connection = connect()
    proxy.halve(UP, end)
    connection.sendall(b"0123456789")
    assert end_of(connection) == end
    assert echo.ended.acquire(timeout=SECONDS)
    assert b"0123456789".startswith(echo.received)
    assert 0 < len(echo.received) < 10
    assert proxy.halved == 1
    again = connect()
    again.sendall(b"whole")
    assert receive(again, 5) == b"whole"


def test_an_answer_is_halved_too(proxy, connect, echo):
    connection = connect()
    proxy.halve(DOWN, FIN)
    connection.sendall(b"0123456789")
    part = receive(connection, 10)
    assert echo.received == b"0123456789"
    assert 0 < len(part) < 10
    assert echo.received.startswith(part)
