"""GroupMemory: shared memory in which the members of a group on one host gather their rows.

    state = memory.arrive(digest, rows, now, seconds)
    while state == WAITS:
        state = memory.wait(seconds)
    total = memory.total

Each round is a turn of the memory, which all members end in the same state: with the sum, or knowing that only the
server can finish the round. `client/native/core/round.c` describes the layout and how a member waits.
"""

import ctypes
import os
import struct
import sys
import threading
from functools import cache
from mmap import mmap
from typing import Any

import numpy as np

from client.native.library import EXCHANGE, Library, NativeRow, description, library
from statsd_bn import limits
from statsd_bn.reduction import FloatArray, Rows

# Why a member takes no further turn: it left in good order, or abandoned the memory.
LEFT, ABANDONED = 1, 2

MAX_MEMBERS = 64  # each has a bit of a word

# How long to spin before sleeping, where each member can have a processor. A sleeper takes half as long to wake up.
# Members that spin for less wake each other in every round, since a woken member arrives late.
SPIN_NANOSECONDS = 100_000

_INTEGER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p

_PACK = [struct.Struct(f"{replicas}Q").pack for replicas in range(limits.MAX_REPLICAS + 1)]  # counts of so many rows
_Buffer: Any = ctypes.c_char * 0  # passes an array as its address, and keeps the array alive


class TurnResult(ctypes.Structure):
    """`sbn_group` of sbn.h; the attributes below are the result of a completed turn; times are in nanoseconds."""

    members: int
    vectors: int
    channels: int
    rows: int  # of all members
    count: int
    behind: int  # delay behind all other members; 0 if unknown: in the first turn, and between two clocks
    is_escalated: int  # whether some member may have sent its rows to the server
    came: int  # arrival of this member
    done: int

    _fields_ = (
        ("memory", _ADDRESS),
        *((name, _INTEGER) for name in ("members", "me", "spin", "most_count")),
        *((name, ctypes.c_uint64) for name in ("turn", "digest")),
        *((name, _INTEGER) for name in ("vectors", "channels", "came", "came_before")),
        *((name, _INTEGER) for name in ("rows", "count", "behind", "is_escalated", "done")),
    )


# Argument types behind the group, and result types.
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "sbn_round": ((ctypes.c_uint64, _ADDRESS, _ADDRESS, *(_INTEGER,) * 3, _ADDRESS, _INTEGER, _INTEGER), ctypes.c_int),
    "sbn_wait": ((_ADDRESS, _INTEGER), ctypes.c_int),
    "sbn_late": ((), ctypes.c_uint64),
    "sbn_escalate": ((), None),
    "sbn_close": ((ctypes.c_int,), None),
    "sbn_closed": ((), ctypes.c_int),
    "sbn_rows": ((_ADDRESS, _ADDRESS, _ADDRESS), None),
}


@cache
def _core() -> Library | None:
    core = library()
    for functions in core or ():
        functions.sbn_group_bytes.argtypes, functions.sbn_group_bytes.restype = (_INTEGER,), _INTEGER
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = (ctypes.POINTER(TurnResult), *arguments), result
    return core


def unavailable_reason() -> str:
    """Why this process cannot use such memory; empty if it can."""
    core = _core()
    if core is None:
        return description()
    return "" if core.holding.sbn_has_futex() else f"{sys.platform} has no futex to wait on shared memory"


def size_of(members: int) -> int:
    """Size of the memory of a group, in bytes."""
    core = _core()
    assert core is not None, unavailable_reason()  # noqa: S101 - callers have checked it
    return int(core.holding.sbn_group_bytes(members))


class GroupMemory:
    """The memory of one group, `size_of(members)` bytes and zero at first, from the view of one member."""

    def __init__(self, memory: mmap, members: int, index: int) -> None:
        self.lock = threading.Lock()  # held during a turn
        self._buffer = _Buffer.from_buffer(memory)
        spin = SPIN_NANOSECONDS if members <= len(os.sched_getaffinity(0)) else 0
        self.result = TurnResult(ctypes.addressof(self._buffer), members, index, spin, limits.MAX_COUNT)
        self._pointer = ctypes.byref(self.result)
        core = _core()
        assert core is not None, unavailable_reason()  # noqa: S101 - as above
        # A round releases the GIL; calls of a microsecond hold it.
        self._round, self._wait = core.releasing.sbn_round, core.releasing.sbn_wait
        self._core: Any = core.holding
        self._sum: Any = None
        self._total: Any = None

    def arrive(self, digest: int, rows: Rows | NativeRow, now: float = 0.0, seconds: float = 0.0) -> int:
        """Arrive at the next turn and wait for the others; return the state of the round, CLOSED if not arrived."""
        # `now` is by the clock that all processes of a host share. A signal ends the wait early, with WAITS.
        if isinstance(rows, NativeRow):
            self._sum, self._total = rows, rows.total_at
            return rows.run(EXCHANGE, self._pointer, digest, int(1e9 * seconds))
        values = rows.values
        replicas, vectors, channels = values.shape
        self._sum = np.empty((vectors, channels))
        self._total = _Buffer.from_buffer(self._sum)
        counts, bits = _PACK[replicas](*rows.counts), values.tobytes()  # quicker than its address, as a rule
        state: int = self._round(
            self._pointer, digest, counts, bits, replicas, vectors, channels,
            self._total, int(1e9 * now), int(1e9 * seconds),
        )  # fmt: skip
        return state

    def wait(self, seconds: float) -> int:
        """Wait for the others, `seconds` at most; return the state of the round. A signal ends the wait early."""
        state: int = self._wait(self._pointer, self._total, int(1e9 * seconds))
        return state

    @property
    def total(self) -> FloatArray:
        """Sum of the rows of the latest completed turn, shape (vectors, channels)."""
        total: FloatArray = self._sum.total if isinstance(self._sum, NativeRow) else self._sum
        return total

    @property
    def late(self) -> list[int]:
        """Indices of the members that have not arrived at this turn."""
        late = self._core.sbn_late(self._pointer)
        return [member for member in range(MAX_MEMBERS) if late >> member & 1]

    def escalate(self) -> None:
        """Announce to the others that this member sends its rows to the server."""
        self._core.sbn_escalate(self._pointer)

    def gathered_rows(self) -> tuple[list[int], list[int], FloatArray]:
        """Copy the rows of a completed turn, before this member arrives at the next one, in member order."""
        # The count of each row, the number of rows of each member, and the values, shape (rows, vectors, channels).
        result = self.result
        counts, replicas = np.empty(result.rows, np.uint64), np.empty(result.members, np.uint64)
        values = np.empty((result.rows, result.vectors, result.channels))
        self._core.sbn_rows(self._pointer, *map(_Buffer.from_buffer, (replicas, counts, values)))
        return counts.tolist(), replicas.tolist(), values

    def abandon(self) -> None:
        """Take no further turn, and announce it to the others."""
        self._core.sbn_close(self._pointer, ABANDONED)

    def leave(self) -> None:
        """Take no further turn because this member ends in good order."""
        self._core.sbn_close(self._pointer, LEFT)

    @property
    def is_abandoned(self) -> bool:
        """Whether some member abandoned the memory, so that the remaining members cannot use it either."""
        return bool(self._core.sbn_closed(self._pointer) == ABANDONED)
