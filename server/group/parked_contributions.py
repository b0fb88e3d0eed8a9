"""Deferral: contributions that reach a restarted server before all members are back."""

from collections import Counter

from server.group.results import Room
from server.group.rounds import conflict, same
from server.group.slave import Slave
from server.limits.quota import size_of
from statsd_bn.messages import Contribution
from statsd_bn.round_key import RoundKey

Deferred = tuple[Slave, Contribution, bytes]
"""A contribution, whose it is, and the peer that sent it."""


class Deferral:
    """Contributions that wait, one for each member and round, in the order of their arrival.

    Args:
        room: what they take is taken from.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._waiting: dict[tuple[int, RoundKey], Deferred] = {}
        self._counts: Counter[int] = Counter()

    @property
    def members(self) -> set[int]:
        """Members whose contributions wait."""
        return set(self._counts)

    def would_exceed(self, most: int, slave: Slave, key: RoundKey) -> bool:
        """Whether accepting this would exceed the slave's limit, `most` contributions."""
        return self._counts[slave.member] >= most and (slave.member, key) not in self._waiting

    def add(self, slave: Slave, contribution: Contribution, peer: bytes) -> None:
        """Keep a contribution; if it was sent again, remember the new peer.

        Raises:
            LimitExceeded: the job would keep too many bytes.
            ContributionConflict: the slave has sent other rows before; these count.
        """
        key = contribution.key
        if earlier := self._waiting.get((slave.member, key)):
            if not same(earlier[1].rows, contribution.rows):
                raise conflict(key, slave.member)
        else:
            size = size_of(contribution.rows)
            self._room.check(size)
            self._room.keep(size)
            self._counts[slave.member] += 1
        self._waiting[slave.member, key] = slave, contribution, peer

    def take(self) -> list[Deferred]:
        """Take all contributions out, in order."""
        taken = list(self._waiting.values())
        self._waiting.clear()
        self._counts.clear()
        self._room.keep(-sum(size_of(contribution.rows) for _, contribution, _ in taken))
        return taken

    def forget(self, gone: Slave) -> None:
        """Drop the contributions of a slave."""
        self._drop([case for case, (slave, _, _) in self._waiting.items() if slave is gone])

    def forget_round(self, key: RoundKey) -> None:
        """Drop the contributions to a round."""
        self._drop([case for case in self._waiting if case[1] == key])

    def _drop(self, cases: list[tuple[int, RoundKey]]) -> None:
        for case in cases:
            _, contribution, _ = self._waiting.pop(case)
            self._room.keep(-size_of(contribution.rows))
            self._counts[case[0]] -= 1
            if not self._counts[case[0]]:
                del self._counts[case[0]]
