"""Limits of connections, without sockets: which are overdue."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from server.network.connections import IDLE_SECONDS, Connections
from server.security.access import Tenant


def with_key(key: str) -> Tenant:
    return Tenant(key, key, ("*",))


@pytest.fixture
def connected() -> Iterator[Callable[..., tuple[Connections, list[int]]]]:
    """Connections, one accepted each second from 0 on."""
    with ExitStack() as stack:

        def make(n: int) -> tuple[Connections, list[int]]:
            connections = Connections()
            numbers = [stack.enter_context(socket.socket()).fileno() for _ in range(n)]
            for second, number in enumerate(numbers):
                connections.accepted(float(second), number)
            return connections, numbers

        yield make


def test_a_frame_that_is_read_after_the_end_of_its_connection_leaves_nothing_behind():
    connections = Connections()
    with socket.socket() as open_one:
        number = open_one.fileno()
        connections.accepted(0.0, number)
        connections.heard(0.0, number, with_key(""), b"one", b"session")
        connections.ended(number)
        connections.accepted(1.0, number)
        connections.heard(1.0, number, with_key(""), b"one", b"session")
        connections.heard(1.0, number, with_key(""), b"other", b"session")
        assert connections.members.keys() == {b"other"}
        connections.ended(number)
    assert not connections.members


def test_a_connection_is_overdue_that_has_been_silent_for_long_unless_it_is_a_members(connected):
    connections, (silent, speaker, member) = connected(3)
    connections.heard(2.0, speaker, with_key(""))
    connections.heard(2.0, member, with_key(""), b"peer", b"session")
    assert connections.overdue(IDLE_SECONDS) == []
    assert connections.overdue(IDLE_SECONDS + 0.5) == [silent]
    assert connections.overdue(IDLE_SECONDS + 3.0) == [silent, speaker]


def test_a_connection_is_a_members_while_its_session_is_registered(connected):
    connections, (number,) = connected(1)
    connections.heard(1.0, number, with_key(""), b"peer", b"session")
    connections.leave(100.0, lambda session: session == b"session")
    assert connections.members.keys() == {b"peer"}
    assert connections.overdue(100.0) == []
    connections.leave(100.0, lambda _: False)
    assert not connections.members
    assert connections.overdue(100.0 + IDLE_SECONDS) == []
    assert connections.overdue(100.5 + IDLE_SECONDS) == [number]
