"""Deferral: contributions that reach a restarted server before all members are back."""

from collections import Counter

from server.limits.quota import Room, size_of
from server.membership.contributor import Contributor
from server.rounds.rounds import conflict, same
from statsd_bn.messages import Contribution
from statsd_bn.round_key import RoundKey

Deferred = tuple[Contributor, Contribution, bytes]
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

    def would_exceed(self, most: int, contributor: Contributor, key: RoundKey) -> bool:
        """Whether accepting this would exceed the member's limit, `most` contributions."""
        return self._counts[contributor.member] >= most and (contributor.member, key) not in self._waiting

    def add(self, contributor: Contributor, contribution: Contribution, peer: bytes) -> None:
        """Keep a contribution; if it was sent again, remember the new peer.

        Raises:
            LimitExceeded: the job would keep too many bytes.
            ContributionConflict: the member has sent other rows before; these count.
        """
        key = contribution.key
        if earlier := self._waiting.get((contributor.member, key)):
            if not same(earlier[1].rows, contribution.rows):
                raise conflict(key, contributor.member)
        else:
            size = size_of(contribution.rows)
            self._room.take(size)
            self._counts[contributor.member] += 1
        self._waiting[contributor.member, key] = contributor, contribution, peer

    def take(self) -> list[Deferred]:
        """Take all contributions out, in order."""
        taken = list(self._waiting.values())
        self._waiting.clear()
        self._counts.clear()
        self._room.keep(-sum(size_of(contribution.rows) for _, contribution, _ in taken))
        return taken

    def forget(self, gone: Contributor) -> None:
        """Drop the contributions of a member."""
        self._drop([case for case, (contributor, _, _) in self._waiting.items() if contributor is gone])

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
