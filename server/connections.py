"""Connections: what is connected to the server's socket, and the means to end one.

ZeroMQ has no call to end a single connection, and tells neither whose it is nor how long it has been silent. It does
tell its file descriptor, when it is accepted and with each message; shutting the descriptor down is, for ZeroMQ, a peer
that has hung up. Whoever is cut off by mistake connects again by itself.
"""

import os
import socket
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass


@dataclass(slots=True)
class Connection:
    """One connection.

    Attributes:
        socket: what the descriptor stood for, because numbers are used again.
        heard: when it was accepted, or a sound message came that was no member's.
        peer: its routing id, once a member has spoken over it; from then on it may be silent.
        key: the public key that it was made with, once something has come over it.
    """

    socket: int
    heard: float
    peer: bytes = b""
    key: str = ""


class Connections:
    """The connections by file descriptor.

    Attributes:
        members: the routing ids of those over which members have spoken.
        ignored: the routing ids of those over which too much had to be refused lately.

    Args:
        most_refusals: how much may be refused between two calls of `forgive`.
    """

    def __init__(self, most_refusals: int) -> None:
        self.members: set[bytes] = set()
        self.ignored: set[bytes] = set()
        self._most_refusals = most_refusals
        self._refusals: dict[bytes, int] = defaultdict(int)
        self._connections: dict[int, Connection] = {}

    def accepted(self, now: float, descriptor: int) -> None:
        """Takes note of a new connection."""
        self.ended(descriptor)
        with suppress(OSError):
            self._connections[descriptor] = Connection(os.fstat(descriptor).st_ino, now)

    def ended(self, descriptor: int) -> None:
        """Takes note of the end of a connection."""
        if former := self._connections.pop(descriptor, None):
            self.members.discard(former.peer)

    def heard(self, now: float, descriptor: int, key: str, member: bytes = b"") -> None:
        """Takes note of a message; `member` is the routing id if a member has sent it."""
        if connection := self._connections.get(descriptor):
            connection.heard, connection.key = now, key
            if member:
                # A frame may be read after its connection has ended, and its number then stands for another.
                self.members.discard(connection.peer)
                connection.peer = member
                self.members.add(member)

    def refused(self, peer: bytes) -> bool:
        """Takes note of a message that was refused, from no member; returns whether that was one too many."""
        self._refusals[peer] += 1
        is_flooding = self._refusals[peer] > self._most_refusals
        if is_flooding:
            self.ignored.add(peer)
        return is_flooding

    def forgive(self) -> None:
        """Forgets what was refused."""
        self.ignored.clear()
        self._refusals.clear()

    def idle(self, since: float) -> list[int]:
        """Returns the connections that nothing has come over since a time, nor ever anything of a member."""
        return [number for number, one in self._connections.items() if one.heard < since and not one.peer]

    def of_others(self, keys: set[str]) -> list[int]:
        """Returns the connections that were made with keys other than these."""
        return [number for number, one in self._connections.items() if one.key and one.key not in keys]

    def cut(self, descriptor: int) -> None:
        """Ends a connection; ZeroMQ notices and closes it."""
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return
        self.members.discard(connection.peer)
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == connection.socket:
                _shut_down(os.dup(descriptor))


def _shut_down(descriptor: int) -> None:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with found:
        found.shutdown(socket.SHUT_RDWR)
