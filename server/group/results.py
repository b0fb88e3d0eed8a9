"""Archive: what a group keeps of its rounds that have ended, and how much room all that it keeps takes.

Members in step can be a round apart, so the latest answers are kept for whoever asks again. Of those before them a
number each is enough: a late copy of a contribution must not begin such a round anew.
"""

from server.group.rounds import Round
from server.limits.quota import Budget
from statsd_bn.round_key import RoundKey

# A copy can be late by what a broken connection had under way, which is far less than this.
REMEMBERED_ROUNDS = 1024


class Room:
    """A group's part of what the server keeps for an owner.

    Args:
        budget: what the server agrees to keep.
        owner: whose group it is, see `server.limits.account`.

    Attributes:
        held: how many bytes the group keeps.
    """

    def __init__(self, budget: Budget, owner: str) -> None:
        self.held = 0
        self._budget = budget
        self._account = budget.account
        self._owner = owner
        self._share = budget.account.share(owner)

    def check(self, size: int) -> None:
        """Raises LimitExceeded where too many bytes would be kept."""
        if not self._account.fits(self._share, size):
            self._budget.check_room(self._owner, size)

    def take(self, size: int) -> None:
        """Keeps bytes.

        Raises:
            LimitExceeded: they would be too many.
        """
        account, share = self._account, self._share
        if not account.fits(share, size):
            self._budget.check_room(self._owner, size)
        account.held += size
        share.held += size
        self.held += size

    def keep(self, size: int) -> None:
        """Takes note of bytes that are kept, or with a size below zero no longer are."""
        self._account.keep(self._share, size)
        self.held += size

    def empty(self) -> None:
        """Gives all back."""
        self.keep(-self.held)


class Archive:
    """The rounds that have ended.

    Args:
        room: what they take is taken from.

    Attributes:
        room: as given.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self._kept: dict[RoundKey, Round] = {}
        self._remembered: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: RoundKey) -> Round | None:
        """Returns a round whose answer is kept."""
        return self._kept.get(key)

    def remembers(self, key: RoundKey) -> bool:
        """Returns whether a round has ended whose answer is no longer kept."""
        return hash(key) in self._remembered

    def add(self, round_: Round, most: int) -> None:
        """Keeps a round that has ended, and of those before it so many that `most` are kept."""
        self._kept[round_.key] = round_
        change = len(round_.answer)
        round_.held += change
        while len(self._kept) > most:
            oldest = next(iter(self._kept))
            change -= self._kept.pop(oldest).held
            self.remember(oldest)
        self.room.keep(change)

    def remember(self, key: RoundKey) -> None:
        """Takes note that a round has ended whose answer is not kept."""
        self._remembered[hash(key)] = None
        if len(self._remembered) > REMEMBERED_ROUNDS:
            del self._remembered[next(iter(self._remembered))]
