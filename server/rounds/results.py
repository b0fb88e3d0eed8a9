"""Archive: the answers of ended rounds that a group keeps.

Members in step can be a round apart, so the latest answers are kept for whoever asks again. A round that failed did not
wait for all, so a member may come to it many rounds later and must still hear why; rounds that succeed do not push such
an answer out. Of those before the latest a number each is enough: a late copy of a contribution must not begin such a
round anew.
"""

from server.limits.quota import Room
from server.rounds.rounds import Round, State
from statsd_bn.round_key import RoundKey

# A copy can be late by what a broken connection had under way, which is far less than this.
REMEMBERED_ROUNDS = 1024


class Archive:
    """The rounds that have ended.

    Args:
        room: what they take is taken from.

    Attributes:
        room: as given.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self._reduced: dict[RoundKey, Round] = {}
        self._failed: dict[RoundKey, Round] = {}
        self._remembered: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._reduced) + len(self._failed)

    def get(self, key: RoundKey) -> Round | None:
        """Round whose answer is kept; None if it is not."""
        return self._reduced.get(key) or (self._failed.get(key) if self._failed else None)

    def remembers(self, key: RoundKey) -> bool:
        """Whether a round has ended and its answer is no longer kept."""
        return hash(key) in self._remembered

    def add(self, round_: Round, most: int) -> None:
        """Keep a round that has ended, and drop the oldest of those that ended in the same way beyond `most`."""
        kept = self._failed if round_.state is State.FAILED else self._reduced
        kept[round_.key] = round_
        change = len(round_.answer)
        round_.held += change
        while len(kept) > most:
            oldest = next(iter(kept))
            change -= kept.pop(oldest).held
            self.remember(oldest)
        self.room.keep(change)

    def remember(self, key: RoundKey) -> None:
        """Remember that a round has ended whose answer is not kept."""
        self._remembered[hash(key)] = None
        if len(self._remembered) > REMEMBERED_ROUNDS:
            del self._remembered[next(iter(self._remembered))]
