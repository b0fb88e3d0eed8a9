"""Region: what lies where in the memory that the members of a group share.

    futex | member 0: arrivals, closed, told, came, came | slot 0 | slot 1 | member 1: arrivals, ... | slot 0 | ...

Every word has one writer, its member, so no process that is killed leaves a lock behind, and nothing has to be atomic
but one word of eight bytes. Two slots are enough, used in turn: nobody comes to turn n + 2 before everybody has come
to n + 1, and nobody comes to n + 1 before it has read what was brought to n.
"""

import struct
from mmap import mmap
from typing import NamedTuple, TypeAlias

import numpy as np

from client.shared_memory.futex import IS_WEAKLY_ORDERED, fence
from statsd_bn import limits
from statsd_bn.reduction import FloatArray
from statsd_bn.rows import Rows

# What different members write never shares a cache line.
LINE_BYTES = 64
WORD_BYTES = 8

# Rows of 16,000 channels and two vectors. Memory that nobody has touched takes no room.
SLOT_BYTES = 2**18

_STRIDE_BYTES = LINE_BYTES + 2 * SLOT_BYTES

# Why a member comes to no further turn: it has given the memory up, or has ended in good order.
GIVEN_UP, ENDED = 1, 2

# The words of a slot before its counts and values: digest, replicas, vectors, channels.
_HEAD_WORDS = 4
_HEAD_BYTES = _HEAD_WORDS * WORD_BYTES
_HEAD = struct.Struct(f"={_HEAD_WORDS}Q")
_SIZES = struct.Struct(f"={_HEAD_WORDS - 1}Q")

_FLOAT = np.dtype(np.float64)

# Where the counts of rows of one shape are, in words; their values, a view; the values' shape, row by row; and how many
# rows each member has brought. A plain tuple, which is quicker to take apart.
_Layout: TypeAlias = tuple[list[int], FloatArray, tuple[int, ...], tuple[int, ...]]

# Layers have rows of a few shapes.
_MOST_LAYOUTS = 256

# Of each size of the rows that a member may bring.
_MOST = (limits.MAX_REPLICAS, limits.MAX_VECTORS, limits.MAX_CHANNELS)


class Brought(NamedTuple):
    """What all members have brought to a turn, in their order, row by row.

    Attributes:
        counts: of each row; as another process has written them, so they may be anything up to 2^64.
        values: shape (rows, vectors, channels), a view where it can be one.
        replicas: how many of the rows each member has brought.
    """

    counts: list[int]
    values: FloatArray
    replicas: tuple[int, ...]


def _fits(replicas: int, vectors: int, channels: int) -> bool:
    """Whether rows of this shape, and their counts, have room in a slot."""
    return WORD_BYTES * (_HEAD_WORDS + replicas * (1 + vectors * channels)) <= SLOT_BYTES


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
        self._closed = [place + 1 for place in self._arrivals]
        self._told = [place + 2 for place in self._arrivals]
        # When each came, in two words used in turn like the slots.
        self._came = tuple([place + word for place in self._arrivals] for word in (3, 4))
        self._slots = tuple([start + LINE_BYTES + slot * SLOT_BYTES for start in self._starts] for slot in (0, 1))
        self._me = me
        # Where this member's slots begin, in bytes.
        self._own = [starts[me] for starts in self._slots]
        # The shape and the counts that stand in each of them.
        self._written: list[object] = [None, None]
        # Where its values go, by slot and shape; None if they do not fit.
        self._targets: dict[tuple[int, tuple[int, ...]], FloatArray | None] = {}
        # Of rows of all members that are alike, by the slot and their shape.
        self._layouts: dict[tuple[int, bytes], _Layout] = {}

    def bring(self, turn: int, digest: int, rows: Rows, came: int = 0) -> None:
        """Writes this member's rows, and says that it has come, and when, in nanoseconds."""
        slot, words, values = turn % 2, self._words, rows.values
        words[self._came[slot][self._me]] = came
        words[self._own[slot] // WORD_BYTES] = digest
        sizes = values.shape, rows.counts
        if self._written[slot] != sizes:
            self._write_sizes(slot, rows)
            self._written[slot] = sizes
        target = self._targets[slot, values.shape]
        if target is not None:
            target[...] = values
        if IS_WEAKLY_ORDERED:
            fence()  # nobody sees the arrival before the rows
        words[self._arrivals[self._me]] = turn
        fence()  # of two that come last at the same time, one at least sees the other

    def have_all_come(self, turn: int) -> bool:
        """Whether every member has come to a turn."""
        words = self._words
        # A loop, since it is done several times a round, and mostly for a few members.
        for place in self._arrivals:
            if words[place] < turn:
                return False
        if IS_WEAKLY_ORDERED:
            fence()  # the rows are looked at after the arrivals
        return True

    def late(self, turn: int) -> list[int]:
        """Returns the members that have not come to a turn."""
        return [member for member, place in enumerate(self._arrivals) if self._words[place] < turn]

    def nanoseconds_behind(self, turn: int) -> int:
        """Returns how much later than all others this member came to a turn to which all have come."""
        words, places = self._words, self._came[turn % 2]
        own, latest = words[places[self._me]], 0
        for member, place in enumerate(places):  # a loop, as above
            if member != self._me and (came := words[place]) > latest:
                latest = came
        return own - latest

    def brought(self, turn: int) -> Brought | None:
        """Returns what the members have brought to a turn to which all have come.

        None where they believe that it is about different things, or their rows cannot be added; where some did not fit
        or have made-up sizes too.
        """
        slots = self._slots_of(turn)
        heads = {self._head(start) for start in slots}
        if len(heads) == 1:
            return self._alike(turn % 2, heads.pop()[WORD_BYTES:])
        if len({(digest, *shape) for digest, _, *shape in map(_HEAD.unpack, heads)}) > 1:
            return None
        return self._of_different_numbers(slots)

    def tell(self, turn: int) -> None:
        """Says that this member tells the server of a turn."""
        self._words[self._told[self._me]] = turn
        fence()  # of one that tells and one that comes last at the same time, one at least sees the other

    def is_told(self, turn: int) -> bool:
        """Whether some member may have told the server of a turn.

        One that has told of the next turn may have told of this one before: it has gone on while this member slept.
        """
        words, found = self._words, False
        for place in self._told:  # a loop, as above
            if words[place] >= turn:
                found = True
        return found

    def close(self, reason: int = GIVEN_UP) -> None:
        """Says that this member comes to no further turn, and why; the first reason stays."""
        place = self._closed[self._me]
        if not self._words[place]:
            self._words[place] = reason
        fence()

    @property
    def is_closed(self) -> bool:
        """Whether some member comes to no further turn."""
        words, found = self._words, False
        for place in self._closed:  # a loop, as above
            if words[place]:
                found = True
        if IS_WEAKLY_ORDERED:
            fence()  # whoever sees that one has closed sees where that one has come before
        return found

    @property
    def is_given_up(self) -> bool:
        """Whether some member comes to no further turn although it goes on, or has failed."""
        return any(self._words[place] == GIVEN_UP for place in self._closed)

    def _alike(self, slot: int, sizes: bytes) -> Brought | None:
        """As a rule all rows have one shape, and lie at equal distances."""
        layout = self._layouts.get((slot, sizes)) or self._lay_out(slot, sizes)
        if layout is None:
            return None
        places, values, shape, replicas = layout
        words = self._words
        return Brought([words[place] for place in places], values.reshape(shape), replicas)

    def _lay_out(self, slot: int, sizes: bytes) -> _Layout | None:
        replicas, vectors, channels = _SIZES.unpack(sizes)
        if not replicas:
            return None
        starts = self._slots[slot]
        firsts = [(start + _HEAD_BYTES) // WORD_BYTES for start in starts]
        places = [place + row for place in firsts for row in range(replicas)]
        shape = len(starts), replicas, vectors, channels
        strides = _STRIDE_BYTES, WORD_BYTES * vectors * channels, WORD_BYTES * channels, WORD_BYTES
        values = self._values(starts[0] + _HEAD_BYTES + WORD_BYTES * replicas, shape, strides)
        layout = places, values, (len(places), vectors, channels), (replicas,) * len(starts)
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[slot, sizes] = layout
        return layout

    def _write_sizes(self, slot: int, rows: Rows) -> None:
        """Writes the shape and the counts of this member's rows, and finds the place of their values."""
        shape, start = rows.values.shape, self._own[slot]
        replicas, first = shape[0], start // WORD_BYTES
        fits = _fits(*shape)
        self._words[first + 1] = replicas if fits else 0
        if fits:
            self._words[first + 2], self._words[first + 3] = shape[1:]
            for place, count in enumerate(rows.counts, first + _HEAD_WORDS):
                self._words[place] = count
        if (slot, shape) not in self._targets:
            if len(self._targets) >= _MOST_LAYOUTS:
                self._targets.clear()
                self._written = [None, None]
            values_at = start + _HEAD_BYTES + WORD_BYTES * replicas
            self._targets[slot, shape] = self._values(values_at, shape) if fits else None

    def _of_different_numbers(self, slots: list[int]) -> Brought | None:
        """Rows of one shape, but not as many of each member."""
        parts = [self._brought_at(start) for start in slots]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        counts = [count for part in found for count in part.counts]
        replicas = tuple(len(part.counts) for part in found)
        return Brought(counts, np.concatenate([part.values for part in found]), replicas)

    def _brought_at(self, start: int) -> Brought | None:
        _, *shape = _HEAD.unpack(self._head(start))
        # Another process has written them, so they may be anything.
        if not all(1 <= size <= most for size, most in zip(shape, _MOST, strict=True)) or not _fits(*shape):
            return None
        replicas, first = shape[0], (start + _HEAD_BYTES) // WORD_BYTES
        values = self._values(start + _HEAD_BYTES + WORD_BYTES * replicas, tuple(shape))
        return Brought(list(self._words[first : first + replicas]), values, (replicas,))

    def _values(self, at: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> FloatArray:
        return np.ndarray(shape, _FLOAT, self._memory, at, strides)

    def _head(self, start: int) -> bytes:
        return self._memory[start : start + _HEAD_BYTES]

    def _slots_of(self, turn: int) -> list[int]:
        return self._slots[turn % 2]
