"""Region: what lies where in the memory that the members of a group share.

    futex | member 0: arrivals, closed | slot 0 | slot 1 | member 1: arrivals, closed | slot 0 | slot 1 | ...

Every word has one writer, its member, so no process that is killed leaves a lock behind, and nothing has to be atomic
but one word of eight bytes. Two slots are enough, used in turn: nobody comes to meeting n + 2 before everybody has come
to n + 1, and nobody comes to n + 1 before it has read what was brought to n.
"""

from mmap import mmap
from typing import NamedTuple

import numpy as np

from client.shared_memory.futex import fence
from statsd_bn.reduction import FloatArray
from statsd_bn.rows import Rows

# What different members write never shares a cache line.
LINE_BYTES = 64
WORD_BYTES = 8

# Rows of 16,000 channels and two vectors. Memory that nobody has touched takes no room.
SLOT_BYTES = 2**18

_STRIDE_BYTES = LINE_BYTES + 2 * SLOT_BYTES

# The words of a slot before its counts and values.
_HEAD_WORDS = 4

_FLOAT = np.dtype(np.float64)


class Brought(NamedTuple):
    """What a member has brought to a meeting.

    Attributes:
        digest: of what it believes the meeting is about.
        rows: its rows; None if they did not fit.
    """

    digest: int
    rows: Rows | None


def size_of(members: int) -> int:
    """Returns how many bytes the region of a group of so many members has."""
    return LINE_BYTES + members * _STRIDE_BYTES


class Region:
    """One group's region, as one member sees it.

    Args:
        memory: `size_of(members)` bytes, all zero at first.
        members: how many there are.
        me: which of them this is, from 0.
    """

    def __init__(self, memory: mmap, members: int, me: int) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._starts = [LINE_BYTES + member * _STRIDE_BYTES for member in range(members)]
        self._arrivals = [start // WORD_BYTES for start in self._starts]
        self._me = me

    def bring(self, meeting: int, digest: int, rows: Rows) -> None:
        """Writes this member's rows, and says that it has come."""
        start = self._slot(self._me, meeting)
        first = start // WORD_BYTES
        self._words[first] = digest
        replicas, vectors, channels = rows.values.shape
        values = start + WORD_BYTES * (_HEAD_WORDS + replicas)
        fits = values + rows.values.nbytes <= start + SLOT_BYTES
        self._words[first + 1] = replicas if fits else 0
        if fits:
            self._words[first + 2], self._words[first + 3] = vectors, channels
            for place, count in enumerate(rows.counts, first + _HEAD_WORDS):
                self._words[place] = count
            self._store(values, rows.values)
        fence()  # nobody sees the arrival before the rows
        self._words[self._arrivals[self._me]] = meeting
        fence()  # of two that come last at the same time, one at least sees the other

    def have_all_come(self, meeting: int) -> bool:
        """Whether every member has come to a meeting."""
        words = self._words
        # A loop, since it is done several times a round, and mostly for a few members.
        for place in self._arrivals:
            if words[place] < meeting:
                return False
        fence()  # the rows are looked at after the arrivals
        return True

    def brought(self, meeting: int) -> list[Brought]:
        """Returns what each member has brought to a meeting to which all have come; the values are views."""
        return [self._brought_by(member, meeting) for member in range(len(self._starts))]

    def close(self) -> None:
        """Says that this member comes to no further meeting."""
        self._words[self._arrivals[self._me] + 1] = 1
        fence()

    @property
    def is_closed(self) -> bool:
        """Whether some member comes to no further meeting."""
        found = any(self._words[place + 1] for place in self._arrivals)
        fence()  # whoever sees that one has closed sees where that one has come before
        return found

    def _brought_by(self, member: int, meeting: int) -> Brought:
        start = self._slot(member, meeting)
        first = start // WORD_BYTES
        digest, replicas, vectors, channels = self._words[first : first + _HEAD_WORDS]
        if not replicas:
            return Brought(digest, None)
        counts = tuple(self._words[first + _HEAD_WORDS : first + _HEAD_WORDS + replicas])
        at = start + WORD_BYTES * (_HEAD_WORDS + replicas)
        return Brought(digest, Rows(counts, self._values(at, (replicas, vectors, channels))))

    def _store(self, at: int, values: FloatArray) -> None:
        np.ndarray(values.shape, _FLOAT, self._memory, at)[...] = values

    def _values(self, at: int, shape: tuple[int, ...]) -> FloatArray:
        return np.ndarray(shape, _FLOAT, self._memory, at)

    def _slot(self, member: int, meeting: int) -> int:
        return self._starts[member] + LINE_BYTES + meeting % 2 * SLOT_BYTES
