"""Connections: what is connected to the server's socket, and how to end one connection.

ZeroMQ has no call to end a single connection, and does not tell whose it is or how long it has been silent. But it
tells the file descriptor, when a connection is accepted and with each message. The server ends a connection by its
descriptor; to ZeroMQ the peer has then hung up. A client that is cut off by mistake connects again by itself.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from server.limits.access import Tenant
from server.network.reset_filter import hang_up

# How long a connection may be silent that is no member's.
IDLE_SECONDS = 60.0


@dataclass(slots=True)
class Connection:
    """One connection.

    Attributes:
        socket: inode of the socket, because descriptors are used again.
        heard: when it was accepted, or a sound message came, or its member left.
        peer: its routing id, while a member speaks over it, which may be silent; else b"".
        session: that member's.
        key: the public key that it was made with, known once something has come over it.
    """

    socket: int
    heard: float
    peer: bytes = b""
    session: bytes = b""
    key: str = ""


class Connections:
    """The connections by file descriptor.

    Attributes:
        members: the owners of the keys of members, by the routing ids that the members speak from.
    """

    def __init__(self) -> None:
        self.members: dict[bytes, Tenant] = {}
        self._connections: dict[int, Connection] = {}

    def accepted(self, now: float, descriptor: int) -> None:
        """Note a new connection."""
        self.ended(descriptor)
        with suppress(OSError):
            self._connections[descriptor] = Connection(os.fstat(descriptor).st_ino, now)

    def ended(self, descriptor: int) -> Connection | None:
        """Note the end of a connection; returns it if it was known."""
        connection = self._connections.pop(descriptor, None)
        if connection:
            self.members.pop(connection.peer, None)
        return connection

    def heard(self, now: float, descriptor: int, tenant: Tenant, peer: bytes = b"", session: bytes = b"") -> None:
        """Note a sound message, and its sender's routing id and session if that is a member."""
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        # A frame may be read after its connection has ended, and its descriptor may then be another's.
        connection.heard, connection.key = now, tenant.key
        if session:
            self.members.pop(connection.peer, None)
            connection.peer, connection.session = peer, session
            self.members[peer] = tenant

    def leave(self, now: float, is_registered: Callable[[bytes], bool]) -> None:
        """Note which connections are no member's any more; from now on they may be silent only as long as any other.

        If another member speaks over one as well, its next message makes the connection a member's again.
        """
        for connection in self._connections.values():
            if connection.peer and not is_registered(connection.session):
                self.members.pop(connection.peer, None)
                connection.heard, connection.peer, connection.session = now, b"", b""

    def overdue(self, now: float) -> list[int]:
        """Connections without a member that have been silent for too long."""
        connections = self._connections.items()
        return [number for number, one in connections if not one.peer and one.heard < now - IDLE_SECONDS]

    def of_members(self) -> dict[int, bytes]:
        """Connections over which members speak, each with its routing id."""
        return {number: one.peer for number, one in self._connections.items() if one.peer}

    def of_others(self, keys: set[str]) -> list[int]:
        """Connections that were made with other keys than these."""
        return [number for number, one in self._connections.items() if one.key and one.key not in keys]

    def cut(self, descriptor: int) -> None:
        """End a connection; ZeroMQ notices and closes it."""
        connection = self.ended(descriptor)
        if connection is None:
            return
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == connection.socket:
                hang_up(descriptor)
