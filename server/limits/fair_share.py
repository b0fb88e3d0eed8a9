"""Fair share: how much of the server's time goes to whom, while several ask for it.

Each frame is counted for a payer. With keys that is a tenant; without keys it is the job of the session that the frame
names. A payer's frames are handled as they come. Only
while others ask as well, a payer that has taken more than the mean has to wait: its frames go into a queue, and all
queues together get at most two thirds of the server's time. The rest is for those who ask for little.

It is pure: the caller measures, and passes times in.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from server.limits.account import Account, Share

# How long a payer's time counts; the window before the current one counts as well. Long beside a round, short beside a
# training.
WINDOW_SECONDS = 0.1

# Time that a payer may take beyond the mean before it has to wait. Jobs of one kind differ by less.
TOLERANCE_SECONDS = 0.002

# Part of the time for all that wait, and how much of it they may save up: frames of some milliseconds.
WAITING_SHARE = 2 / 3
MOST_CREDIT_SECONDS = 0.005

# How long a frame waits at most. Members ask again after a second, so an older frame has come a second time.
MOST_WAIT_SECONDS = 1.0

# While a waiting frame may be taken: how many frames are read at most, and how many of them handled, before it is.
READS_BETWEEN, TAKEN_BETWEEN = 32, 4

# What may wait: frames of one connection, of which a member has one or two in flight, and bytes of one payer. Large
# frames leave a quarter for small ones.
PEER_FRAMES, PAYER_BYTES = 256, 2**26
SMALL_BYTES = 4096

# What a frame takes beside its bytes.
FRAME_BYTES = 512

T = TypeVar("T")


@dataclass(slots=True)
class _Payer(Generic[T]):
    """A payer: the time it has taken lately, and the frames of it that wait, by peer."""

    name: str
    share: Share
    taken: float = 0.0
    size: int = 0
    frames: OrderedDict[bytes, deque[tuple[float, int, T]]] = field(default_factory=OrderedDict)


class FairShare(Generic[T]):
    """Decides which frame is handled next.

    Args:
        account: where the bytes of frames that wait are counted.

    Attributes:
        waiting: the payers whose frames wait.
        sole: the only payer that has asked for anything lately; None if there are others, or frames wait. Its frames
            go at once, unmeasured.
        dropped: how many frames were dropped, because too many waited, or too long.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._payers: dict[str, _Payer[T]] = {}
        self.waiting: OrderedDict[str, _Payer[T]] = OrderedDict()
        self.sole: str | None = None
        self._before: dict[str, float] = {}
        self._taken = 0.0
        self._window_ends = 0.0
        self._credit = MOST_CREDIT_SECONDS
        self._credited = 0.0
        self._reads = 0
        self.dropped = 0

    def may_go(self, now: float, name: str, peer: bytes) -> bool:
        """Whether to handle a payer's frame at once; if not, let it `wait`."""
        if now >= self._window_ends:
            self._turn_window(now)
        payer = self._payers.get(name)
        if payer is None:
            payer = self._payers[name] = _Payer(name, self._account.share(name))
        self.sole = name if len(self._payers) == 1 and not self.waiting else None
        if peer in payer.frames:
            return False  # what came before it waits
        if len(self._payers) == 1 or not self._is_ahead(payer):
            self._reads += READS_BETWEEN // TAKEN_BETWEEN
            return True
        return not self.waiting and self._has_credit(now)

    def took(self, name: str, seconds: float) -> None:
        """Count the time that a frame took."""
        payer = self._payers[name]
        if len(self._payers) > 1 and self._is_ahead(payer):
            self._credit -= seconds
        payer.taken += seconds
        self._taken += seconds

    def wait(self, now: float, name: str, peer: bytes, size: int, frame: T) -> None:
        """Let a frame wait; drop it if too much waits."""
        self._reads += 1
        payer = self._payers[name]
        size += FRAME_BYTES
        most = PAYER_BYTES if size <= SMALL_BYTES else PAYER_BYTES * 3 // 4
        frames = payer.frames.get(peer, ())
        if len(frames) >= PEER_FRAMES or payer.size + size > most or self._account.is_full(size):
            self.dropped += 1
            return
        self._weigh(payer, size)
        payer.frames.setdefault(peer, deque()).append((now, size, frame))
        self.waiting[name] = payer

    def is_due(self, now: float) -> bool:
        """Whether to handle a waiting frame before reading more."""
        return self._reads >= READS_BETWEEN and self._may_take(now)

    def next(self, now: float) -> tuple[str, T] | None:
        """The next waiting frame and its payer; None if it is not yet time for one."""
        self._reads = 0
        if now >= self._window_ends:
            self._turn_window(now)
        while self.waiting and self._may_take(now):
            name, payer = self.waiting.popitem(last=False)
            peer, frames = payer.frames.popitem(last=False)
            since, size, frame = frames.popleft()
            self._weigh(payer, -size)
            if frames:
                payer.frames[peer] = frames
            if payer.frames:
                self.waiting[name] = payer
            if now - since <= MOST_WAIT_SECONDS:
                self._payers.setdefault(name, payer)
                return name, frame
            self.dropped += 1
        return None

    def _may_take(self, now: float) -> bool:
        """Whether those that wait have time left, or nobody else asks for any."""
        return self._has_credit(now) or len(self._payers) <= len(self.waiting)

    def _has_credit(self, now: float) -> bool:
        self._credit = min(MOST_CREDIT_SECONDS, self._credit + WAITING_SHARE * (now - self._credited))
        self._credited = now
        return self._credit > 0

    def _is_ahead(self, payer: _Payer[T]) -> bool:
        return payer.taken > self._taken / len(self._payers) + TOLERANCE_SECONDS

    def _turn_window(self, now: float) -> None:
        """Forget the time taken before the last window, and payers that have asked for nothing since."""
        is_next = now < self._window_ends + WINDOW_SECONDS
        for name, payer in list(self._payers.items()):
            recent = payer.taken - self._before.get(name, 0.0) if is_next else 0.0
            if recent or payer.frames:
                payer.taken = recent
            else:
                del self._payers[name]
        self._before = {name: payer.taken for name, payer in self._payers.items()}
        self._taken = sum(self._before.values())
        self._window_ends = now + WINDOW_SECONDS

    def _weigh(self, payer: _Payer[T], size: int) -> None:
        payer.size += size
        self._account.keep(payer.share, size)
