"""Limits of connections, without sockets: which are overdue."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from server.network.connections import IDLE_SECONDS, ConnectionTable
from server.security.access import Principal


def with_key(key: str) -> Principal:
    return Principal(key, key, ("*",))


@pytest.fixture
def connected() -> Iterator[Callable[..., tuple[ConnectionTable, list[int]]]]:
    """Connections, one accepted each second from 0 on."""
    with ExitStack() as stack:

        def make(n: int) -> tuple[ConnectionTable, list[int]]:
            connections = ConnectionTable()
            numbers = [stack.enter_context(socket.socket()).fileno() for _ in range(n)]
            for second, number in enumerate(numbers):
                connections.add(float(second), number)
            return connections, numbers

        yield make


def test_a_frame_that_is_read_after_the_end_of_its_connection_leaves_nothing_behind():
    connections = ConnectionTable()
    with socket.socket() as open_one:
        number = open_one.fileno()
        connections.add(0.0, number)
        connections.record(0.0, number, with_key(""), b"one", b"session")
        connections.remove(number)
        connections.add(1.0, number)
        connections.record(1.0, number, with_key(""), b"one", b"session")
        connections.record(1.0, number, with_key(""), b"other", b"session")
        assert connections.members.keys() == {b"other"}
        connections.remove(number)
    assert not connections.members


def test_a_connection_is_overdue_that_has_been_silent_for_long_unless_it_is_a_members(connected):
    connections, (silent, speaker, member) = connected(3)
    connections.record(2.0, speaker, with_key(""))
    connections.record(2.0, member, with_key(""), b"peer", b"session")
    assert connections.idle(IDLE_SECONDS) == []
    assert connections.idle(IDLE_SECONDS + 0.5) == [silent]
    assert connections.idle(IDLE_SECONDS + 3.0) == [silent, speaker]


def test_a_connection_is_a_members_while_its_session_is_registered(connected):
    connections, (number,) = connected(1)
    connections.record(1.0, number, with_key(""), b"peer", b"session")
    connections.expire_members(100.0, lambda session: session == b"session")
    assert connections.members.keys() == {b"peer"}
    assert connections.idle(100.0) == []
    connections.expire_members(100.0, lambda _: False)
    assert not connections.members
    assert connections.idle(100.0 + IDLE_SECONDS) == []
    assert connections.idle(100.5 + IDLE_SECONDS) == [number]
