"""Unpredictable: makes libc's random numbers unpredictable.

ZeroMQ counts routing ids up from libc's `rand()`, which it never seeds: each server would start with the same number.
"""

import ctypes
import os

# The largest state of glibc's `random()`, which its `rand()` comes from.
_STATE_BYTES = 256

# The first bytes say how it is arranged; what `initstate` writes there stays.
_ARRANGEMENT_BYTES = 4

# libc reads and writes it for as long as the process lives.
_state = ctypes.create_string_buffer(_STATE_BYTES)


def seed() -> None:
    """Seed libc's `rand()` from the system; call it before any ZeroMQ socket is made."""
    libc = ctypes.CDLL(None)
    libc.srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))
    if hasattr(libc, "gnu_get_libc_version"):
        # A seed has only 32 bits, so some first numbers are more likely than others; the state has 1,984.
        libc.initstate(ctypes.c_uint(int.from_bytes(os.urandom(4))), _state, ctypes.c_size_t(_STATE_BYTES))
        fresh = os.urandom(_STATE_BYTES - _ARRANGEMENT_BYTES)
        ctypes.memmove(ctypes.byref(_state, _ARRANGEMENT_BYTES), fresh, len(fresh))
