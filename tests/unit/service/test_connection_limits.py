"""Connections and their members, without sockets of ZeroMQ."""

import math
import select
import socket

from server.network.connections import ConnectionTable
from server.security.access import ANONYMOUS


def test_a_frame_that_is_read_after_the_end_of_its_connection_leaves_nothing_behind():
    table = ConnectionTable(math.inf)
    with socket.socket() as open_one:
        number = open_one.fileno()
        table.add(number)
        table.set_peer(b"one", number)
        table.record(b"one", ANONYMOUS, b"session")
        table.remove(number)
        table.record(b"one", ANONYMOUS, b"session")
        table.add(number)
        table.set_peer(b"one", number)
        table.record(b"one", ANONYMOUS, b"session")
        table.set_peer(b"other", number)
        table.record(b"other", ANONYMOUS, b"session")
        assert table.members.keys() == {b"other"}
        table.remove(number)
    assert not table.members
    assert not table.by_peer


def test_a_connection_is_a_members_while_its_session_is_registered():
    table = ConnectionTable(math.inf)
    with socket.socket() as open_one:
        number = open_one.fileno()
        table.add(number)
        table.set_peer(b"peer", number)
        table.record(b"peer", ANONYMOUS, b"")
        assert not table.members
        table.record(b"peer", ANONYMOUS, b"session")
        table.expire_members(lambda session: session == b"session")
        assert table.members.keys() == {b"peer"}
        assert table.member_peers() == {number: b"peer"}
        table.expire_members(lambda _: False)
        assert not table.members
        assert not table.member_peers()


def test_the_oldest_connection_without_a_member_is_closed_beyond_the_limit():
    table, pairs = ConnectionTable(2), [socket.socketpair() for _ in range(4)]
    for number, (ours, _) in enumerate(pairs):
        table.add(ours.fileno())
        table.set_peer(b"%d" % number, ours.fileno())
        if number == 0:
            table.record(b"0", ANONYMOUS, b"session")
    ended = select.select([ours for ours, _ in pairs], [], [], 0.0)[0]
    assert ended == [pairs[1][0], pairs[2][0]]
    assert table.members.keys() == {b"0"}
    # It is no longer a member's, whatever is read from it.
    table.record(b"1", ANONYMOUS, b"session")
    assert table.members.keys() == {b"0"}
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
