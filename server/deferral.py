"""Deferral: contributions that came to a restarted server before all members had come back to it."""

from server.archive import Room
from server.quota import size_of
from server.slave import Slave
from statsd_bn.messages import Contribution

Deferred = tuple[Slave, Contribution, bytes]
"""A contribution, whose it is, and the peer that sent it."""


class Deferral:
    """The contributions that wait, in the order in which they came.

    Args:
        room: what they take is taken from.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._waiting: list[Deferred] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def members(self) -> set[int]:
        """Whose contributions wait."""
        return {slave.member for slave, _, _ in self._waiting}

    def add(self, slave: Slave, contribution: Contribution, peer: bytes) -> None:
        """Lets a contribution wait.

        Raises:
            LimitExceeded: the job would keep too many bytes.
        """
        size = size_of(contribution.rows)
        self._room.check(size)
        self._room.keep(size)
        self._waiting.append((slave, contribution, peer))

    def take(self) -> list[Deferred]:
        """Returns all of them; none waits any more."""
        taken, self._waiting = self._waiting, []
        self._room.keep(-sum(size_of(contribution.rows) for _, contribution, _ in taken))
        return taken

    def forget(self, gone: Slave) -> None:
        """Forgets those of a slave."""
        for slave, contribution, peer in self.take():
            if slave is not gone:
                self._room.keep(size_of(contribution.rows))
                self._waiting.append((slave, contribution, peer))
