"""Pace: who of a group holds the others up.

In each round a member waits from its contribution to the answer, and between two rounds it computes. Whoever is slow
waits least, so what the others lose by it is what each of them waits more: the least wait among the others, less its
own. Ranks that are late in turn wait alike, and then nobody is named. This needs no more than a sum for each member,
and holds for rounds over the server and in shared memory alike: of those the members say themselves how long they
waited.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Over which time; and how much of it one may cost the others.
WINDOW_SECONDS, MOST_HELD = 60.0, 0.1

# The first steps compile, search for kernels and fill caches, each rank in its own time.
STARTUP_SECONDS = 30.0

# Told once; again only if it was less than this meanwhile.
CALM = MOST_HELD / 2


@dataclass(frozen=True, slots=True)
class Minute:
    """What one window has shown.

    Attributes:
        waiting: the part of the time that each member waited, 0 to 1.
        score: how fast each member computes, 0 to 1: beside the fastest one, or beside its own best window, whichever
            is less.
        slowest: who waited least; None with fewer than two members.
        held: the part of the time that the others waited for that one.
    """

    waiting: Mapping[int, float] = field(default_factory=dict)
    score: Mapping[int, float] = field(default_factory=dict)
    slowest: int | None = None
    held: float = 0.0


@dataclass(slots=True)
class Pace:
    """How a group gets on, window after window.

    Attributes:
        minute: the latest whole window.
        due: when the current one is over; None before the first round.
        is_told: whether the slowest was told of, and has not been faster since.
    """

    minute: Minute = field(default_factory=Minute)
    due: float | None = None
    is_told: bool = False
    _rounds: int = 0
    _waited: dict[int, float] = field(default_factory=dict)
    _best: dict[int, float] = field(default_factory=dict)

    def begin(self, now: float, rounds: int) -> None:
        """Note the first round."""
        if self.due is None and rounds:
            self.due = now + STARTUP_SECONDS

    def end_window(self, now: float, rounds: int, waited: Mapping[int, float]) -> bool:
        """End a window and begin the next.

        Args:
            now: the time; the window was due.
            rounds: how many the group has had.
            waited: the seconds that each member has waited since it came.

        Returns:
            Whether the slowest is to be told of.
        """
        seconds = WINDOW_SECONDS + (now - self.due if self.due is not None else 0.0)
        had = rounds - self._rounds
        shares = {
            member: min(1.0, max(0.0, total - self._waited[member]) / seconds)
            for member, total in waited.items()
            if member in self._waited
        }
        self._rounds, self._waited, self.due = rounds, dict(waited), now + WINDOW_SECONDS
        self.minute = self._minute(shares, seconds, had) if had and shares else Minute()
        if self.minute.held < CALM:
            self.is_told = False
        is_news = self.minute.held > MOST_HELD and not self.is_told
        self.is_told = self.is_told or is_news
        return is_news

    def forget(self, member: int) -> None:
        """Forget a member that has left or was lost; another may come with its number."""
        self._waited.pop(member, None)
        self._best.pop(member, None)

    def told(self, member: int) -> dict[str, float]:
        """Entries of a report about a member; none before its first whole window."""
        if member not in self.minute.waiting:
            return {}
        return {"waiting": self.minute.waiting[member], "score": self.minute.score[member]}

    def _minute(self, shares: Mapping[int, float], seconds: float, rounds: int) -> Minute:
        # Seconds of computing for a round; never 0, since it divides.
        computing = {member: max(1e-9, (1 - share) * seconds / rounds) for member, share in shares.items()}
        best = min(computing.values())
        score = {}
        for member, own in computing.items():
            self._best[member] = min(own, self._best.get(member, own))
            score[member] = min(best, self._best[member]) / own
        slowest, *others = sorted(shares, key=lambda member: shares[member])
        if not others:
            return Minute(shares, score)
        return Minute(shares, score, slowest, shares[others[0]] - shares[slowest])
