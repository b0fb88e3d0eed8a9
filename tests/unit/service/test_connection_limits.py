"""Connections and their members, without sockets of ZeroMQ."""

import math
import select
import socket

from server.network.connections import ConnectionTable
from server.security.access import ANONYMOUS


def connect(table: ConnectionTable, connection: socket.socket, peer: bytes, session: bytes = b"session") -> None:
    """Add a connection, and record the first frame of a peer over it."""
    table.add(connection.fileno())
    table.set_peer(peer, connection.fileno())
    table.record(peer, ANONYMOUS, session)


def test_a_frame_that_is_read_after_the_end_of_its_connection_leaves_nothing_behind():
    table = ConnectionTable(math.inf)
    with socket.socket() as connection:
        connect(table, connection, b"one")
        table.remove(connection.fileno())
        table.record(b"one", ANONYMOUS, b"session")
        connect(table, connection, b"one")
        table.set_peer(b"other", connection.fileno())
        table.record(b"other", ANONYMOUS, b"session")
        assert table.members.keys() == {b"other"}
        table.remove(connection.fileno())
    assert not table.members
    assert not table.by_peer


def test_a_connection_belongs_to_a_member_while_its_session_is_registered():
    table = ConnectionTable(math.inf)
    with socket.socket() as connection:
        connect(table, connection, b"peer", session=b"")
        assert not table.members
        table.record(b"peer", ANONYMOUS, b"session")
        table.expire_members(lambda session: session == b"session")
        assert table.members.keys() == {b"peer"}
        assert table.member_peers() == {connection.fileno(): b"peer"}
        table.expire_members(lambda _: False)
        assert not table.members
        assert not table.member_peers()


def test_beyond_the_limit_the_oldest_connection_without_a_member_is_closed():
    table, pairs = ConnectionTable(2), [socket.socketpair() for _ in range(4)]
    for number, (ours, _) in enumerate(pairs):
        connect(table, ours, b"%d" % number, session=b"" if number else b"session")
    ended = select.select([ours for ours, _ in pairs], [], [], 0.0)[0]
    assert ended == [pairs[1][0], pairs[2][0]]
    assert table.members.keys() == {b"0"}
    # A frame that is read after the connection was closed adds no member.
    table.record(b"1", ANONYMOUS, b"session")
    assert table.members.keys() == {b"0"}
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
