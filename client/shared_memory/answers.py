"""Answers: where the members of one host leave for one another what the server has answered.

    member 0: turn, bytes, nanoseconds, session | frame | member 1: turn, bytes, nanoseconds, session | frame | ...

Every word has one writer, as in the region of the rows. One place for each member is enough: it leaves an answer only
in a turn to which all have come, and by then all have left the turn before, and read what was left in it.
"""

from mmap import mmap

from client.shared_memory.futex import IS_WEAKLY_ORDERED, fence
from client.shared_memory.region import LINE_BYTES, SLOT_BYTES, WORD_BYTES
from statsd_bn import limits

# An aggregate is as long as one row, and a header. A longer one is not left here: each then asks for it.
ANSWER_BYTES = SLOT_BYTES + limits.MAX_REQUEST_HEADER_BYTES

_STRIDE_BYTES = LINE_BYTES + ANSWER_BYTES


def size_of(members: int) -> int:
    """Returns how many bytes the answers of so many members take."""
    return members * _STRIDE_BYTES


class Answers:
    """The answers of one group's members on one host, as one member sees them.

    Args:
        memory: shared by the members, all zero at first.
        at: where the answers begin, a multiple of `LINE_BYTES`; `size_of(members)` bytes.
        members: how many there are.
        me: which of them this is, from 0.
        session: by which this member lets the others speak for it.
    """

    def __init__(self, memory: mmap, at: int, members: int, me: int, session: bytes) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._starts = [at + member * _STRIDE_BYTES for member in range(members)]
        self._turns = [start // WORD_BYTES for start in self._starts]
        self._me = me
        place = self._starts[me] + 3 * WORD_BYTES
        memory[place : place + limits.TOKEN_BYTES] = session

    @property
    def sessions(self) -> bytes:
        """The sessions of all members, one behind the other; sound once all have come to a turn."""
        places = (start + 3 * WORD_BYTES for start in self._starts)
        return b"".join(self._memory[place : place + limits.TOKEN_BYTES] for place in places)

    def leave(self, turn: int, frame: bytes, seconds: float) -> None:
        """Leaves an answer for the others.

        Args:
            turn: of the round.
            frame: the answer; empty: each has to ask for itself.
            seconds: how long it took to come.
        """
        if len(frame) > ANSWER_BYTES:
            return
        first, start = self._turns[self._me], self._starts[self._me] + LINE_BYTES
        self._words[first + 1], self._words[first + 2] = len(frame), int(1e9 * seconds)
        self._memory[start : start + len(frame)] = frame
        if IS_WEAKLY_ORDERED:
            fence()  # nobody sees the turn before the answer
        self._words[first] = turn
        fence()  # nobody is woken before

    def is_there(self, turn: int) -> bool:
        """Whether somebody has left the answer of a turn; `find` reads it."""
        words, found = self._words, False
        for place in self._turns:  # a loop, as in the region
            if words[place] == turn:
                found = True
        return found

    def find(self, turn: int) -> tuple[bytes, float] | None:
        """Returns the answer of a turn, and how many seconds it took; None if nobody has left one."""
        for place, start in zip(self._turns, self._starts, strict=True):
            if self._words[place] == turn:
                if IS_WEAKLY_ORDERED:
                    fence()  # the answer is looked at after the turn
                first = start + LINE_BYTES
                # Another process has written it, so it may be anything.
                size = min(self._words[place + 1], ANSWER_BYTES)
                return self._memory[first : first + size], self._words[place + 2] / 1e9
        return None
