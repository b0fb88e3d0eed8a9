"""GroupMemory: all members of a group on one host bring their rows, and each adds everybody's.

    found = memory.arrive(digest, rows, now, seconds)
    while found == WAITS:
        found = memory.wait(seconds)
    total = memory.total

Members come to it in turns: a turn is over when all have come, and nobody leaves it with a sum before. So after it all
members know the same: the sum, or that only the server can end the round. `client/native/core/round.c` says what lies
where, and how a member waits.
"""

import ctypes
import os
import struct
import sys
import threading
from functools import cache
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np

from client.native.library import EXCHANGE, Library, description, library
from client.native.row import NativeRow
from statsd_bn import limits
from statsd_bn.reduction import FloatArray, Rows

# Why a member comes to no further turn: it has ended in good order, or has given the memory up.
ENDED, GIVEN_UP = 1, 2

# Each member has a bit of a word.
MOST_MEMBERS = 64

# How long to look for the others without sleeping, where each member can have a processor. A sleeper takes about half
# as long to wake up. Members that spin for less wake one another in each round, since a woken member comes late.
SPIN_NANOSECONDS = 100_000

_INTEGER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p

# What packs the counts of so many rows.
_PACK = [struct.Struct(f"{replicas}Q").pack for replicas in range(limits.MAX_REPLICAS + 1)]

# Of an array: is passed as its address, and keeps it.
_Start: Any = ctypes.c_char * 0


class Found(ctypes.Structure):
    """What a turn that is done has brought, in `sbn_group` of sbn.h.

    Attributes:
        members, vectors, channels: the shape of the rows, and how many members bring some.
        rows: how many rows all have brought.
        count: the sum of their counts.
        behind: how many nanoseconds later than all others this member came; 0 if others came later, for the first turn,
            and where another process has another clock, as it may in a container.
        is_told: whether some member, perhaps this one, may have told the server that it waits.
        came: when this member came, in nanoseconds.
        done: when the sum was there, likewise.
    """

    members: int
    vectors: int
    channels: int
    rows: int
    count: int
    behind: int
    is_told: int
    came: int
    done: int

    _fields_ = (
        ("memory", _ADDRESS),
        *((name, _INTEGER) for name in ("members", "me", "spin", "most_count")),
        *((name, ctypes.c_uint64) for name in ("turn", "digest")),
        *((name, _INTEGER) for name in ("vectors", "channels", "came", "came_before")),
        *((name, _INTEGER) for name in ("rows", "count", "behind", "is_told", "done")),
    )


# What the functions take behind the group, and what they return.
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "sbn_round": (
        (ctypes.c_uint64, _ADDRESS, _ADDRESS, _INTEGER, _INTEGER, _INTEGER, _ADDRESS, _INTEGER, _INTEGER),
        ctypes.c_int,
    ),
    "sbn_wait": ((_ADDRESS, _INTEGER), ctypes.c_int),
    "sbn_late": ((), ctypes.c_uint64),
    "sbn_tell": ((), None),
    "sbn_close": ((ctypes.c_int,), None),
    "sbn_closed": ((), ctypes.c_int),
    "sbn_rows": ((_ADDRESS, _ADDRESS, _ADDRESS), None),
}


class Brought(NamedTuple):
    """What all members have brought to a turn, in their order, row by row.

    Attributes:
        counts: of each row.
        replicas: how many of the rows each member has brought.
        values: shape (rows, vectors, channels).
    """

    counts: list[int]
    replicas: list[int]
    values: FloatArray


@cache
def _core() -> Library | None:
    core = library()
    for functions in core or ():
        functions.sbn_group_bytes.argtypes, functions.sbn_group_bytes.restype = (_INTEGER,), _INTEGER
        for name, (behind, result) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = (ctypes.POINTER(Found), *behind), result
    return core


def why_not() -> str:
    """Returns why this process has no such memory; empty if it can have some."""
    core = _core()
    if core is None:
        return description()
    return "" if core.holding.sbn_has_futex() else f"{sys.platform} lets no process wait in memory that it shares"


def size_of(members: int) -> int:
    """Returns how many bytes the memory of a group of so many members has."""
    core = _core()
    assert core is not None, why_not()  # noqa: S101 - whoever asks knows that there is one
    return int(core.holding.sbn_group_bytes(members))


class GroupMemory:
    """The memory of one group, as one member sees it; only where `why_not` returns nothing.

    Args:
        memory: shared by the members; `size_of(members)` bytes, all zero at first.
        members: how many there are.
        me: which of them this is, from 0.

    Attributes:
        lock: for whoever takes a turn; one thread of a process at a time.
        found: what the latest turn has brought, once it is done.
    """

    def __init__(self, memory: mmap, members: int, me: int) -> None:
        self.lock = threading.Lock()
        self._start = _Start.from_buffer(memory)
        spin = SPIN_NANOSECONDS if members <= len(os.sched_getaffinity(0)) else 0
        self.found = Found(ctypes.addressof(self._start), members, me, spin, limits.MAX_COUNT)
        self._pointer = ctypes.byref(self.found)
        core = _core()
        assert core is not None, why_not()  # noqa: S101 - as above
        # A round lets other threads run; what takes a microsecond does not.
        self._round, self._wait = core.releasing.sbn_round, core.releasing.sbn_wait
        self._core: Any = core.holding
        self._sum: Any = None
        self._total: Any = None

    def arrive(self, digest: int, rows: Rows | NativeRow, now: float = 0.0, seconds: float = 0.0) -> int:
        """Comes to the next turn, and waits for the others; returns how the round stands, CLOSED if it has not come.

        It ends early, with WAITS, when a signal comes, so that Python handles it.

        Args:
            digest: of what it is about, 64 bits; the same for all members.
            rows: what this member brings.
            now: the time, by the clock that the processes of a host have in common; a row that is still to be computed
                comes when it is.
            seconds: how long to wait at most.
        """
        if isinstance(rows, NativeRow):
            self._sum, self._total = rows, rows.total_at
            return rows.run(EXCHANGE, self._pointer, digest, int(1e9 * seconds))
        values = rows.values
        replicas, vectors, channels = values.shape
        self._sum = np.empty((vectors, channels))
        self._total = _Start.from_buffer(self._sum)
        found: int = self._round(
            self._pointer,
            digest,
            _PACK[replicas](*rows.counts),
            values.tobytes(),  # quicker than its address, as a rule
            replicas,
            vectors,
            channels,
            self._total,
            int(1e9 * now),
            int(1e9 * seconds),
        )
        return found

    def wait(self, seconds: float) -> int:
        """Waits on, for so many seconds at most; returns how the round stands. It ends early when a signal comes."""
        found: int = self._wait(self._pointer, self._total, int(1e9 * seconds))
        return found

    @property
    def total(self) -> FloatArray:
        """The sum of the rows of the latest turn, once it is done: shape (vectors, channels)."""
        found: FloatArray = self._sum.total if isinstance(self._sum, NativeRow) else self._sum
        return found

    @property
    def have_all_come(self) -> bool:
        """Whether all have come to this turn."""
        return not self._core.sbn_late(self._pointer)

    @property
    def late(self) -> list[int]:
        """The members that have not come to this turn."""
        late = self._core.sbn_late(self._pointer)
        return [member for member in range(MOST_MEMBERS) if late >> member & 1]

    def tell(self) -> None:
        """Lets the others know that this member tells the server that it waits."""
        self._core.sbn_tell(self._pointer)

    def brought(self) -> Brought:
        """Returns a copy of what the members have brought to a turn that is done, until this one comes to the next."""
        group = self.found
        counts, replicas = np.empty(group.rows, np.uint64), np.empty(group.members, np.uint64)
        values = np.empty((group.rows, group.vectors, group.channels))
        self._core.sbn_rows(self._pointer, *map(_Start.from_buffer, (replicas, counts, values)))
        return Brought(counts.tolist(), replicas.tolist(), values)

    def close(self) -> None:
        """Comes to no further turn, and lets the others know."""
        self._core.sbn_close(self._pointer, GIVEN_UP)

    def end(self) -> None:
        """The same, since this member ends."""
        self._core.sbn_close(self._pointer, ENDED)

    @property
    def is_closed(self) -> bool:
        """Whether some member, perhaps this one, comes to no further turn."""
        return bool(self._core.sbn_closed(self._pointer))

    @property
    def is_given_up(self) -> bool:
        """Whether it is closed for those that go on: not if some member has only ended in good order."""
        return bool(self._core.sbn_closed(self._pointer) == GIVEN_UP)
