"""GroupMemory: shared memory in which the members of a group on one host gather their rows.

    state = memory.arrive(digest, rows, now, seconds)
    while state == WAITS:
        state = memory.wait(seconds)
    total = memory.total

Each round is a turn of the memory. All members end a turn in the same state: they have the sum, or only the server can
finish the round. `client/native/core/round.c` describes the layout and how a member waits.

The memory is anonymous: one member offers its file descriptor over a Unix socket, and the others receive it. Nothing
remains when the processes end, however they end.
"""

import ctypes
import fcntl
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from client.native.library import EXCHANGE, NativeRow, description, library
from statsd_bn import limits
from statsd_bn.reduction import FloatArray, Rows

# Why a member takes no further turn: it left in good order, or abandoned the memory.
LEFT, ABANDONED = 1, 2

MAX_MEMBERS = 64  # each has a bit of a word

# How long a waiting member spins before it sleeps, if each member can have a processor. Waking up takes half this time.
# With a shorter spin members sleep in every round: a woken member is late for the next one, and the others fall asleep.
SPIN_NANOSECONDS = 100_000

# Timeout for receiving the memory. It is long, because a group must not lose shared memory on a busy machine. If the
# offering process ends, its socket closes at once; if it freezes, the server detects that before the timeout.
RECEIVE_SECONDS = 60.0
CHECK_SECONDS = 0.5  # interval at which a waiting process checks whether the job is broken

# Seals against a change of the size: a process that reads truncated memory is killed.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)

# A system has _USERS user IDs. A user namespace shows all unmapped users as the overflow ID, usually _OVERFLOW_USER.
_USERS, _OVERFLOW_USER = 2**32 - 1, 65_534

_CREDENTIALS, _NAME_BYTES = struct.Struct("3i"), 16

_PACK = [struct.Struct(f"{replicas}Q").pack for replicas in range(limits.MAX_REPLICAS + 1)]  # for the counts of n rows
_Buffer: Any = ctypes.c_char * 0  # passes an array as its address, and keeps the array alive


def unavailable_reason() -> str:
    """Why this process cannot share memory with others; empty if it can."""
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no anonymous shared memory (memfd)"
    if (core := library()) is None:
        return description()
    if not core.holding.sbn_has_futex():
        return f"{sys.platform} has no futex to wait on shared memory"
    if os.getuid() == _overflow_user():
        return f"uid {os.getuid()} is the overflow uid of this container, shared by all unmapped users; use another"
    return ""


def _core() -> Any:
    core = library()
    assert core is not None, description()  # noqa: S101 - callers have checked it
    return core


def size_of(members: int) -> int:
    """Size of the memory of a group, in bytes."""
    return int(_core().holding.sbn_group_bytes(members))


class GroupMemory(ctypes.Structure):
    """The memory of one group from the view of one member, `sbn_group` of sbn.h, which describes the fields."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("members", "me", "spin_ns", "most_count")),
        *((name, ctypes.c_uint64) for name in ("turn", "digest")),
        *((name, ctypes.c_int64) for name in ("vectors", "channels", "came", "came_before")),
        *((name, ctypes.c_int64) for name in ("rows", "count", "behind_ns", "is_escalated", "done_ns")),
    )

    def __init__(self, memory: mmap, members: int, index: int) -> None:
        # The memory has `size_of(members)` bytes, zero at first.
        self.lock = threading.Lock()  # held during a turn
        self._buffer = _Buffer.from_buffer(memory)
        spin = SPIN_NANOSECONDS if members <= len(os.sched_getaffinity(0)) else 0
        super().__init__(ctypes.addressof(self._buffer), members, index, spin, limits.MAX_COUNT)
        self._at = ctypes.addressof(self)
        # A round releases the GIL; calls that take a microsecond hold it.
        releasing, self._core = _core()
        self._round, self._wait = releasing.sbn_round, releasing.sbn_wait
        self._sum: Any = None
        self._total: Any = None

    def arrive(self, digest: int, rows: Rows | NativeRow, now: float = 0.0, seconds: float = 0.0) -> int:
        """Arrive at the next turn and wait for the others; return the state: CLOSED if a member takes no more turns."""
        # `now` is by `time.monotonic`, which all processes of a host share. A signal ends the wait early, with WAITS.
        if isinstance(rows, NativeRow):
            self._sum, self._total = rows, rows.total_at
            return rows.run(EXCHANGE, self._at, digest, int(1e9 * seconds))
        values = rows.values
        replicas, vectors, channels = values.shape
        self._sum = np.empty((vectors, channels))
        self._total = _Buffer.from_buffer(self._sum)
        counts, bits = _PACK[replicas](*rows.counts), values.tobytes()  # usually quicker than taking an address
        state: int = self._round(
            self._at, digest, counts, bits, replicas, vectors, channels,
            self._total, int(1e9 * now), int(1e9 * seconds),
        )  # fmt: skip
        return state

    def wait(self, seconds: float) -> int:
        """Wait for the others, `seconds` at most; return the state of the round. A signal ends the wait early."""
        state: int = self._wait(self._at, self._total, int(1e9 * seconds))
        return state

    @property
    def total(self) -> FloatArray:
        """Sum of the rows of the latest completed turn, shape (vectors, channels)."""
        total: FloatArray = self._sum.total if isinstance(self._sum, NativeRow) else self._sum
        return total

    @property
    def late(self) -> list[int]:
        """Indices of the members that have not arrived at this turn."""
        late = self._core.sbn_late(self._at)
        return [member for member in range(MAX_MEMBERS) if late >> member & 1]

    def escalate(self) -> None:
        """Announce to the others that this member sends its rows to the server."""
        self._core.sbn_escalate(self._at)

    def gathered_rows(self) -> tuple[list[int], list[int], FloatArray]:
        """Copy the rows of a completed turn, in member order; call it before this member arrives at the next turn."""
        # Returns the count of each row, each member's number of rows, and the values, shape (rows, vectors, channels).
        counts, replicas = np.empty(self.rows, np.uint64), np.empty(self.members, np.uint64)
        values = np.empty((self.rows, self.vectors, self.channels))
        self._core.sbn_rows(self._at, *map(_Buffer.from_buffer, (replicas, counts, values)))
        return counts.tolist(), replicas.tolist(), values

    def abandon(self) -> None:
        """Take no further turn, and announce it to the others."""
        self._core.sbn_close(self._at, ABANDONED)

    def leave(self) -> None:
        """Take no further turn because this member ends in good order."""
        self._core.sbn_close(self._at, LEFT)

    @property
    def is_abandoned(self) -> bool:
        """Whether some member abandoned the memory, so that the remaining members cannot use it either."""
        return bool(self._core.sbn_closed(self._at) == ABANDONED)


class MemoryOffer:
    """Memory that other processes of this user and host receive by its `name`; a thread sends it until `close`."""

    def __init__(self, size: int) -> None:
        # An OSError says that the system provides no memory, or no socket.
        with ExitStack() as stack:
            self._descriptor = os.memfd_create("statsd_bn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, self._descriptor)
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap(self._descriptor, size)
            self.name = f"statsd_bn-{secrets.token_hex(_NAME_BYTES)}"
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(_address(self.name))
            self._listener.listen(128)
            self._thread = threading.Thread(target=self._serve, name="statsd_bn memory", daemon=True)
            self._thread.start()
            self._resources = stack.pop_all()

    def close(self) -> None:
        """End the offer; processes that received the memory keep it."""
        with self._resources:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with closing(peer), suppress(OSError):
                peer.settimeout(RECEIVE_SECONDS)
                if _user_of(peer) == os.getuid():
                    socket.send_fds(peer, [b"\0"], [self._descriptor])


def receive_memory(name: str, size: int, is_broken: Callable[[], bool] = bool) -> mmap:
    """Receive the memory of an offer; the text of an OSError says why it cannot be received."""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(CHECK_SECONDS)
        try:
            server.connect(_address(name))
        except OSError as error:
            raise OSError("it cannot open the shared memory; it is on another host, or in another container") from error
        if _user_of(server) != os.getuid():
            raise OSError(f"it runs as uid {os.getuid()}, and the shared memory belongs to uid {_user_of(server)}")
        expiry, descriptors = time.monotonic() + RECEIVE_SECONDS, None
        while descriptors is None:
            try:
                descriptors = socket.recv_fds(server, 1, 1)[1]
            except TimeoutError:
                if is_broken() or time.monotonic() >= expiry:
                    raise
    if not descriptors:
        raise OSError("it received no file descriptor of the shared memory")
    (descriptor,) = descriptors
    try:
        if os.fstat(descriptor).st_size != size:
            raise OSError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, expected {size}")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the shared memory is not sealed: another process could truncate it")
        return mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _overflow_user() -> int:
    """Overflow user ID of this user namespace; -1 if all users are mapped."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        # Each line is a range: first ID inside, first ID outside, length.
        has_all = sum(int(line.split()[2]) for line in lines) >= _USERS
        return -1 if has_all else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return _OVERFLOW_USER


def _address(name: str) -> str:
    """Abstract socket address of an offer: it has no file that could outlive the process."""
    return f"\0{name}"


def _user_of(peer: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
